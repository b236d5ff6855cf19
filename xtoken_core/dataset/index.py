"""The offset index: where each record of a user's files begins, found in one pass and kept on disk."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from xtoken_core.atomic import sync, sync_tree
from xtoken_core.dataset.readers import (
    ArrowBlocks,
    Offsets,
    ParquetBlocks,
    Reader,
    open_binary,
    open_reader,
    usable_columns,
)
from xtoken_core.dataset.records import BadRecord, MissingFieldError, Record, UnusableRecordError
from xtoken_core.dataset.sources import Source, find_sources
from xtoken_core.errors import InputError

Progress = Callable[[int, int], None]
_FORMAT = 1
_CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 30
"""Longest line of a file that is text at all; lines beyond `MAX_RECORD_BYTES` are records that cannot be used."""
_OPEN_FILES = 64


class DataIndex:
    """The records of one or several files, numbered from 0 in the order of the files and their lines or rows.

    Every line of a `.jsonl` or `.txt` file is a record, usable or not, so that numbers are stable; a newline at
    the end of a file adds none. The text itself stays in its files: the index is a table of int64 offsets that is
    mapped into memory, and what is read is one record at a time.
    """

    def __init__(self, directory: Path, sources: Sequence[Source], field: str, manifest: dict[str, Any]) -> None:
        self.fingerprint: str = manifest["fingerprint"]
        """SHA-256, in hex, of the field and of every file's kind, size and content; paths and times do not count."""
        self._sources = tuple(sources)
        self._field = field
        self._starts: list[int] = [0, *np.cumsum(manifest["records"]).tolist()]
        self._offset_starts: list[int] = [0, *np.cumsum(manifest["offsets"]).tolist()]
        self._offsets: Offsets = np.memmap(directory / "offsets.i64", dtype=np.int64, mode="r")
        if len(self._offsets) != self._offset_starts[-1]:
            raise ValueError(f"{directory} is not whole")
        self._readers: OrderedDict[int, Reader] = OrderedDict()

    @classmethod
    def build(
        cls, paths: Sequence[Path], *, field: str, cache_dir: Path, progress: Progress | None = None
    ) -> DataIndex:
        """Return the index of these files: read from the cache if they are unchanged, else made in one pass over them.

        Args:
            paths: Files (`.jsonl`, `.parquet`, `.txt`) or directories saved by `datasets`.
            field: The field or column that holds the text.
            cache_dir: Where indices are kept, each in a directory named by paths, sizes, times of change and field.
            progress: Called during the pass with the bytes read so far and in all.

        Raises:
            InputError: A file is missing, unreadable, of an unknown kind, or no record of it has the field; no
                record at all is usable; a line is no text by its length; the cache cannot be written.
        """
        sources = find_sources(paths)
        directory = cache_dir.absolute() / _cache_key(sources, field)
        found = cls._load(directory, sources, field)
        if found is not None:
            return found
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=cache_dir))
        except OSError as error:
            raise InputError(f"cannot keep the data's index in {cache_dir}: {error.strerror}") from error
        try:
            manifest = _write_index(scratch, sources, field, progress)
            cls(scratch, sources, field, manifest)._check_usable()
            _install(scratch, directory)
        except OSError as error:
            raise InputError(f"cannot keep the data's index in {cache_dir}: {error.strerror}") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return cls(directory, sources, field, manifest)

    @classmethod
    def _load(cls, directory: Path, sources: Sequence[Source], field: str) -> DataIndex | None:
        try:
            manifest = json.loads((directory / "index.json").read_text(encoding="utf-8"))
            return cls(directory, sources, field, manifest)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, record_numbers: Sequence[int]) -> list[Record | BadRecord]:
        """Return the records with these numbers, in this order.

        Raises:
            InputError: A file has changed since it was indexed, or cannot be read any more.
            IndexError: No record has this number.
        """
        return [self._read_one(number) for number in record_numbers]

    def location(self, number: int) -> str:
        """Return the location of a record as `file:line`, counted from 1 (a row for parquet and arrow files)."""
        file, row = self._locate(number)
        return f"{self._sources[file].path}:{row + 1}"

    def raw_bytes(self, number: int) -> int | None:
        """Return the bytes of a record's line, which its text cannot exceed; None where records are no lines."""
        file, row = self._locate(number)
        if self._sources[file].kind not in ("jsonl", "txt"):
            return None
        at = self._offset_starts[file] + row
        return int(self._offsets[at + 1] - self._offsets[at])

    def first_conversation(self) -> str | None:
        """Return the location of the first file whose first usable record has `messages`; None without one.

        A file that cannot hold messages is not read.
        """
        for file in range(len(self._sources)):
            if not self._reader(file).may_hold_messages:
                continue
            numbers = range(self._starts[file], self._starts[file + 1])
            first = next((r for r in map(self._read_one, numbers) if isinstance(r, Record)), None)
            if first is not None and "messages" in first.value:
                return self.location(first.number)
        return None

    def documents(self) -> Iterator[str]:
        """Yield every usable record in order, as plain text (see `Record.document`)."""
        for number in range(len(self)):
            record = self._read_one(number)
            if isinstance(record, Record):
                yield record.document

    def _read_one(self, number: int) -> Record | BadRecord:
        file, row = self._locate(number)
        try:
            return Record(number, self._reader(file).read(row))
        except UnusableRecordError as error:
            return BadRecord(number, self.location(number), str(error))

    def _locate(self, number: int) -> tuple[int, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"there is no record {number} among {len(self)}")
        file = bisect_right(self._starts, number) - 1
        return file, number - self._starts[file]

    def _reader(self, file: int) -> Reader:
        if file not in self._readers:
            offsets = self._offsets[self._offset_starts[file] : self._offset_starts[file + 1]]
            self._readers[file] = open_reader(self._sources[file], offsets, self._field)
            if len(self._readers) > _OPEN_FILES:
                self._readers.popitem(last=False)
        self._readers.move_to_end(file)
        return self._readers[file]

    def _check_usable(self) -> None:
        """Raise an InputError if a file never has the field, or if no record of any file is usable."""
        if not len(self):
            raise InputError(f"{_names(self._sources)}: there is no record in it")
        first: BadRecord | None = None
        usable = False
        for file, source in enumerate(self._sources):
            missing = rows = self._starts[file + 1] - self._starts[file]
            for row in range(rows):
                try:
                    self._reader(file).read(row)
                except UnusableRecordError as error:
                    first = first or BadRecord(row, f"{source.path}:{row + 1}", str(error))
                    missing -= not isinstance(error, MissingFieldError)
                else:
                    usable, missing = True, 0
                    break
            if missing and missing == rows:
                raise InputError(
                    f"no record of {source.path} has the field {self._field!r}: set `field` to the one with the text"
                )
        if not usable and first is not None:
            raise InputError(
                f"{_names(self._sources)}: no record can be used; {first.location} is the first: {first.reason}"
            )


def _cache_key(sources: Sequence[Source], field: str) -> str:
    files = [[str(s.path), s.kind, s.size, s.mtime_ns] for s in sources]
    return hashlib.sha256(json.dumps([_FORMAT, field, files]).encode()).hexdigest()[:32]


def _names(sources: Sequence[Source]) -> str:
    return ", ".join(str(source.path) for source in sources[:3]) + (", ..." if len(sources) > 3 else "")


def _write_index(directory: Path, sources: Sequence[Source], field: str, progress: Progress | None) -> dict[str, Any]:
    """Write `offsets.i64` and `index.json`, both on disk when this returns."""
    total = sum(source.size for source in sources)
    contents, records, offsets, done = [], [], [], 0
    with (directory / "offsets.i64").open("wb") as out:
        for source in sources:
            before = out.tell()
            digest = hashlib.sha256()
            lines, begin = source.kind in ("jsonl", "txt"), 0
            for chunk, position in _chunks(source):
                digest.update(chunk)
                if lines:
                    begin = _write_line_starts(out, chunk, position, source.size, begin)
                    if position - begin > MAX_LINE_BYTES:
                        raise InputError(
                            f"{source.path}: the line that begins at byte {begin} is longer than "
                            f"{MAX_LINE_BYTES >> 20} MiB, so this is no text with one record per line"
                        )
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
            if lines:
                np.array([source.size], dtype=np.int64).tofile(out)
                rows = (out.tell() - before) // 8 - 1
            else:
                rows = _write_block_starts(out, source, field)
            source.check_unchanged()
            records.append(rows)
            offsets.append((out.tell() - before) // 8)
            contents.append([source.kind, source.size, digest.hexdigest()])
    fingerprint = hashlib.sha256(json.dumps([_FORMAT, field, contents]).encode()).hexdigest()
    manifest = {"fingerprint": fingerprint, "records": records, "offsets": offsets}
    (directory / "index.json").write_text(json.dumps(manifest), encoding="utf-8")
    sync_tree(directory)
    return manifest


def _chunks(source: Source) -> Iterator[tuple[bytes, int]]:
    """Yield the file's bytes in chunks, each with its position."""
    with open_binary(source.path) as file:
        position = 0
        while True:
            try:
                chunk = file.read(_CHUNK_BYTES)
            except OSError as error:
                raise InputError(f"cannot read the data file {source.path}: {error.strerror}") from error
            if not chunk:
                return
            yield chunk, position
            position += len(chunk)


def _write_line_starts(out: BinaryIO, chunk: bytes, position: int, size: int, begin: int) -> int:
    """Write where the lines of a chunk begin; return the beginning of the last one, `begin` if none does."""
    starts = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n")).astype(np.int64) + (position + 1)
    if position == 0:
        starts = np.concatenate([np.zeros(1, dtype=np.int64), starts])
    starts[starts < size].tofile(out)
    return int(starts[-1]) if len(starts) else begin


def _write_block_starts(out: BinaryIO, source: Source, field: str) -> int:
    blocks = ParquetBlocks(source.path) if source.kind == "parquet" else ArrowBlocks(source.path)
    usable_columns(blocks.schema, field, source.path)
    starts = np.concatenate([[0], np.cumsum(blocks.rows)]).astype(np.int64)
    starts.tofile(out)
    return int(starts[-1])


def _install(scratch: Path, directory: Path) -> None:
    """Rename a finished index to its final name; replace a damaged one or one that another process wrote first."""
    discarded = scratch.with_name(scratch.name.replace("building", "discarded"))
    try:
        scratch.rename(directory)
    except OSError:
        try:
            directory.rename(discarded)
        except FileNotFoundError:
            discarded.mkdir()
        scratch.rename(directory)
        shutil.rmtree(discarded, ignore_errors=True)
    sync(directory.parent)
