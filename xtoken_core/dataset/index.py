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
from xtoken_core.dataset.held_out import PARTS, Choice, Part
from xtoken_core.dataset.readers import ArrowBlocks, Offsets, ParquetBlocks, Reader, open_reader, usable_columns
from xtoken_core.dataset.records import FORM, BadRecord, MissingFieldError, Record, UnusableRecordError
from xtoken_core.dataset.sources import LINES, Source, find_sources
from xtoken_core.dataset.unpacking import Progress, open_binary
from xtoken_core.errors import InputError, os_errors_as

_FORMAT = 1
_CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 30
"""Longest line of a file that is text at all; lines beyond `MAX_RECORD_BYTES` are records that cannot be used."""
_OPEN_FILES = 64


class DataIndex:
    """The records of one or several files, numbered from 0 in the order of the files and their lines or rows.

    Every line of a `.jsonl` or `.txt` file is a record, usable or not, so that numbers are stable; a newline at
    the end of a file adds none. The text itself stays in its files: the index is a table of int64 offsets that is
    mapped into memory, and what is read is one record at a time. An index of a part numbers the records of this part
    alone.
    """

    def __init__(
        self, directory: Path, sources: Sequence[Source], field: str, manifest: dict[str, Any], part: Part | None = None
    ) -> None:
        self.fingerprint: str = manifest["fingerprint"]
        """SHA-256, in hex, of the field and of every file's kind, size and content; paths and times do not count. Of
        either part that of the part to train on: of lines, that of a file of these alone."""
        self._sources = tuple(sources)
        self._field = field
        self._starts: list[int] = [0, *np.cumsum(manifest["records"]).tolist()]
        self._offset_starts: list[int] = [0, *np.cumsum(manifest["offsets"]).tolist()]
        self._offsets: Offsets = np.memmap(directory / "offsets.i64", dtype=np.int64, mode="r")
        if len(self._offsets) != self._offset_starts[-1]:
            raise ValueError(f"{directory} is not whole")
        self._part = part
        held_out = np.fromfile(directory / "held_out.i64", dtype=np.int64) if part else np.zeros(0, dtype=np.int64)
        if part and len(held_out) != manifest["held_out"]:
            raise ValueError(f"{directory} is not whole")
        self._held_out = held_out
        self._trained_before = held_out - np.arange(len(held_out))  # per held-out record, those before it that are not
        self._readers: OrderedDict[int, Reader] = OrderedDict()

    @classmethod
    def build(
        cls,
        paths: Sequence[Path],
        *,
        field: str,
        cache_dir: Path,
        progress: Progress | None = None,
        part: Part | None = None,
    ) -> DataIndex:
        """Return the index of these files: read from the cache if they are unchanged, else made in one pass over them.

        Args:
            paths: Files of `READ_SUFFIXES`, or directories saved by `datasets`.
            field: The field or column that holds the text.
            cache_dir: Where indices are kept, each in a directory named by paths, sizes, times of change and field.
            progress: Called during the pass with the bytes read so far and in all.
            part: Number only these records; the pass chooses which are held out, for both parts.

        Raises:
            InputError: A file is missing, unreadable, of an unknown kind, or no record of it has the field; no
                record at all, or of a part, is usable; a line is no text by its length; the cache cannot be written.
        """
        sources = find_sources(paths, progress)
        choice = None if part is None else Choice()
        directory = cache_dir.absolute() / _cache_key(sources, field, choice)
        found = cls._load(directory, sources, field, part)
        if found is not None:
            return found
        with os_errors_as(InputError, f"cannot keep the data's index in {cache_dir}"):
            cache_dir.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=cache_dir))
            try:
                manifest = _write_index(scratch, sources, field, choice, progress)
                cls(scratch, sources, field, manifest)._check_usable()
                parts = [cls(scratch, sources, field, manifest, each) for each in PARTS if choice is not None]
                if not all(any(True for _ in each.documents()) for each in parts):
                    raise InputError(
                        f"{_names(sources)}: no text of it can be held out for an evaluation: name another in eval.path"
                    )
                _install(scratch, directory)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        return cls(directory, sources, field, manifest, part)

    @classmethod
    def _load(cls, directory: Path, sources: Sequence[Source], field: str, part: Part | None) -> DataIndex | None:
        try:
            manifest = json.loads((directory / "index.json").read_text(encoding="utf-8"))
            return cls(directory, sources, field, manifest, part)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def __len__(self) -> int:
        if self._part == "held_out":
            return len(self._held_out)
        return self._starts[-1] - len(self._held_out)

    def read(self, record_numbers: Sequence[int]) -> list[Record | BadRecord]:
        """Return the records with these numbers, in this order.

        Raises:
            InputError: A file has changed since it was indexed, or cannot be read any more.
            IndexError: No record has this number.
        """
        return [self._read_row(number, *self._locate(number)) for number in record_numbers]

    def location(self, number: int) -> str:
        """Return the location of a record as `file:line`, counted from 1 (a row for parquet and arrow files)."""
        file, row = self._locate(number)
        return f"{self._sources[file].name}:{row + 1}"

    def raw_bytes(self, number: int) -> int | None:
        """Return the bytes of a record's line, which its text cannot exceed; None where records are no lines."""
        file, row = self._locate(number)
        if self._sources[file].kind not in LINES:
            return None
        at = self._offset_starts[file] + row
        return int(self._offsets[at + 1] - self._offsets[at])

    def first_conversation(self) -> str | None:
        """Return the location of the first file whose first usable record has `messages`; None without one."""
        return next((location for location, _ in self.conversations()), None)

    def conversations(self) -> Iterator[tuple[str, str | None]]:
        """Yield the location of every file whose first usable record has `messages`, and the form they were made of.

        A file that cannot hold messages is not read.
        """
        for file in range(len(self._sources)):
            if not self._reader(file).may_hold_messages:
                continue
            rows = range(self._starts[file + 1] - self._starts[file])
            records = (self._read_row(row, file, row) for row in rows)
            first = next((record for record in records if isinstance(record, Record)), None)
            if first is not None and "messages" in first.value:
                yield f"{self._sources[file].name}:{first.number + 1}", first.value.get(FORM)

    def documents(self) -> Iterator[str]:
        """Yield every usable record in order, as plain text (see `Record.document`)."""
        return (record.document for record in self._usable())

    def values(self) -> Iterator[dict[str, Any]]:
        """Yield the value of every usable record in order (see `Record`)."""
        return (record.value for record in self._usable())

    def _usable(self) -> Iterator[Record]:
        return (record for number in range(len(self)) for record in self.read([number]) if isinstance(record, Record))

    def _read_row(self, number: int, file: int, row: int) -> Record | BadRecord:
        try:
            return Record(number, self._reader(file).read(row))
        except UnusableRecordError as error:
            return BadRecord(number, f"{self._sources[file].name}:{row + 1}", str(error))

    def _locate(self, number: int) -> tuple[int, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"there is no record {number} among {len(self)}")
        if self._part == "held_out":
            number = int(self._held_out[number])
        elif self._part == "train":
            # Every held-out record that lies before it in the text moves it by one.
            number += int(self._trained_before.searchsorted(number, side="right"))
        file = bisect_right(self._starts, number) - 1
        return file, number - self._starts[file]

    def _reader(self, file: int) -> Reader:
        if file not in self._readers:
            offsets = self._offsets[self._offset_starts[file] : self._offset_starts[file + 1]]
            self._readers[file] = open_reader(self._sources[file], offsets, self._field)
            # The one that was read longest ago: a shuffled order over thousands of files must not run out of
            # descriptors.
            if len(self._readers) > _OPEN_FILES:
                self._readers.popitem(last=False)
        self._readers.move_to_end(file)
        return self._readers[file]

    def _check_usable(self) -> None:
        """Raise an InputError if a file never has the field, or if no record of any file is usable."""
        if not len(self):
            raise InputError(f"{_names(self._sources)}: there is no record in it")
        first: BadRecord | None = None
        usable, why = False, ""
        for file, source in enumerate(self._sources):
            missing = rows = self._starts[file + 1] - self._starts[file]
            for row in range(rows):
                try:
                    self._reader(file).read(row)
                except UnusableRecordError as error:
                    first = first or BadRecord(row, f"{source.name}:{row + 1}", str(error))
                    missing -= not isinstance(error, MissingFieldError)
                    why = why or str(error)
                else:
                    usable, missing = True, 0
                    break
            if missing and missing == rows:
                raise InputError(
                    f"no record of {source.name} has the field {self._field!r}: {why}: name the one with the text by "
                    "--set data.field=NAME (held-out text: eval.field; xtoken align check: --field NAME)"
                )
        if not usable and first is not None:
            raise InputError(
                f"{_names(self._sources)}: no record can be used; {first.location} is the first: {first.reason}"
            )


def can_hold_out(paths: Sequence[Path], field: str) -> bool:
    """Return True if both parts of a text have a record; the text is read until they do.

    Args:
        paths: As of `DataIndex.build`.
        field: Likewise.

    Raises:
        InputError: A file is missing, unreadable, or of an unknown kind; a line is no text by its length.
    """
    choice = Choice()
    read = (None for source in find_sources(paths) for _ in _read_whole(source, field, choice))
    return any(choice.is_divided for _ in read) or choice.is_divided


def _cache_key(sources: Sequence[Source], field: str, choice: Choice | None) -> str:
    files = [[str(s.path), s.kind, s.size, s.mtime_ns] for s in sources]
    form = [_FORMAT, field, files] if choice is None else [_FORMAT, field, files, "parts"]
    return hashlib.sha256(json.dumps(form).encode()).hexdigest()[:32]


def _names(sources: Sequence[Source]) -> str:
    return ", ".join(str(source.name) for source in sources[:3]) + (", ..." if len(sources) > 3 else "")


def _write_index(
    directory: Path, sources: Sequence[Source], field: str, choice: Choice | None, progress: Progress | None
) -> dict[str, Any]:
    """Write `offsets.i64`, with a choice `held_out.i64`, and `index.json`, all on disk when this returns."""
    total = sum(source.size for source in sources)
    contents, records, offsets, done = [], [], [], 0
    with (directory / "offsets.i64").open("wb") as out:
        for source in sources:
            before, lines = out.tell(), source.kind in LINES
            digest = hashlib.sha256()
            for chunk, position in _read_whole(source, field, choice):
                if choice is None:
                    digest.update(chunk)
                if lines:
                    _write_line_starts(out, chunk, position, source.size)
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
            if lines:
                np.array([source.size], dtype=np.int64).tofile(out)
                rows = (out.tell() - before) // 8 - 1
            else:
                starts = _block_starts(source, field)
                starts.tofile(out)
                rows = int(starts[-1])
            # After the last byte: offsets of a file that grew meanwhile would point into other lines.
            source.check_unchanged()
            records.append(rows)
            offsets.append((out.tell() - before) // 8)
            contents.append([source.kind, source.size, digest.hexdigest()])
    manifest: dict[str, Any] = {"records": records, "offsets": offsets}
    if choice is not None:
        kinds = "+".join(dict.fromkeys(source.kind for source in sources))
        contents = [[kinds, choice.size, choice.digest.hexdigest()]]
        np.array(choice.held_out, dtype=np.int64).tofile(directory / "held_out.i64")
        manifest["held_out"] = len(choice.held_out)
    manifest["fingerprint"] = hashlib.sha256(json.dumps([_FORMAT, field, contents]).encode()).hexdigest()
    (directory / "index.json").write_text(json.dumps(manifest), encoding="utf-8")
    # Before the directory gets its name: an index that exists is whole, also after a power cut.
    sync_tree(directory)
    return manifest


def _read_whole(source: Source, field: str, choice: Choice | None) -> Iterator[tuple[bytes, int]]:
    """Yield the file's bytes in chunks, each with its position, once a choice has taken them.

    Rows are chosen before the bytes of their file are read; meanwhile, chunks are empty.
    """
    if choice is None:
        yield from _chunks(source)
        return
    take: Callable[[bytes], None] = choice.add_lines
    if source.kind not in LINES:
        take, starts = choice.add_bytes, _block_starts(source, field)
        for _ in choice.add_rows(open_reader(source, starts, field), int(starts[-1])):
            yield b"", 0
    for chunk, position in _chunks(source):
        take(chunk)
        yield chunk, position
    choice.end_lines()


def _chunks(source: Source) -> Iterator[tuple[bytes, int]]:
    """Yield the file's bytes in chunks, each with its position.

    Raises:
        InputError: It cannot be read, or a line is no text by its length.
    """
    with open_binary(source.path) as file:
        position = begin = 0  # where the line that a chunk ends in begins
        while True:
            with os_errors_as(InputError, f"cannot read the data file {source.name}"):
                chunk = file.read(_CHUNK_BYTES)
            if not chunk:
                return
            # Only the last one matters: a line that is too long is refused at the chunk in which it becomes so.
            newline = chunk.rfind(b"\n")
            if newline >= 0:
                begin = position + newline + 1
            if source.kind in LINES and position - begin > MAX_LINE_BYTES:
                raise InputError(
                    f"{source.name}: the line that begins at byte {begin} is longer than {MAX_LINE_BYTES >> 20} MiB, "
                    "so this is no text with one record per line"
                )
            yield chunk, position
            position += len(chunk)


def _write_line_starts(out: BinaryIO, chunk: bytes, position: int, size: int) -> None:
    """Write where the lines of a chunk begin."""
    starts = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n")).astype(np.int64) + (position + 1)
    if position == 0:
        starts = np.concatenate([np.zeros(1, dtype=np.int64), starts])
    starts[starts < size].tofile(out)


def _block_starts(source: Source, field: str) -> Offsets:
    """Return the first row of every block of a file of rows, and the number of rows."""
    blocks = ParquetBlocks(source.path) if source.kind == "parquet" else ArrowBlocks(source.path)
    usable_columns(blocks.schema, field, source.path)
    return np.concatenate([[0], np.cumsum(blocks.rows)]).astype(np.int64)


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
