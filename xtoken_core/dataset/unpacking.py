"""Text in other forms, written once to the user's cache with a record on every line: `.gz`, `.zst`, `.csv`, `.json`."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from xtoken_core.atomic import atomic_path
from xtoken_core.config.data import COMPRESSIONS, MOST_TEXT_BYTES
from xtoken_core.dataset.records import MAX_RECORD_BYTES
from xtoken_core.errors import InputError, first_line, os_errors_as
from xtoken_core.regular_files import open_regular
from xtoken_core.user_cache import user_cache

Progress = Callable[[int, int], None]
CHUNK = 1 << 20
_SMALL_BYTES = 256 << 20
_LARGEST_BYTES = 4 << 30
_LARGEST_RATIO = 100
"""Bounds of what a row group, an arrow file or a packed text decodes to: 256 MiB, or a hundred times its bytes; of the
first two up to 4 GiB."""
_SPACE = re.compile(r"[ \t\r\n]*")


def unpacked(path: Path, progress: Progress | None = None) -> Path:
    """Return the file of lines that has a file's records, written first if need be.

    Args:
        path: A compressed file, a `.csv` file or a `.json` list; one of another size or time of change is written
            again. A row of `.csv` becomes an object with the names of the first row; a null stands for a cell that is
            missing.
        progress: Called with the bytes read so far and in all; it may raise to stop.

    Raises:
        InputError: It cannot be read, is damaged, unpacks to too much, or the cache cannot be written.
    """
    try:
        status, codec = path.stat(), COMPRESSIONS.get(path.suffix.lower())
        version = hashlib.sha256(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()
        suffix = Path(path.stem if codec else path.name).suffix.lower()
        target = user_cache() / "text" / f"{version[:32]}{'.txt' if suffix == '.txt' else '.jsonl'}"
        if not target.exists():
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with atomic_path(target) as scratch, open_binary(path) as file, scratch.open("wb") as out:
                for part in _parts(file, codec, suffix):
                    out.write(part)
                    check_decoded(out.tell(), status.st_size, str(path), largest=MOST_TEXT_BYTES)
                    if progress is not None:
                        progress(file.tell(), status.st_size)
                # An index of it stays valid where the cache is made anew.
                out.flush()
                os.utime(scratch, ns=(status.st_mtime_ns, status.st_mtime_ns))
    except (OSError, csv.Error, ValueError, RecursionError) as error:  # OSError: of the decoders too
        raise InputError(f"{path} cannot be read into {user_cache()}: {first_line(error)}") from error
    return target


def _parts(file: Any, codec: str | None, suffix: str) -> Iterator[bytes]:
    """Yield the bytes of the lines.

    Raises:
        ValueError: It is not what its ending says; the text is the reason.
    """
    if codec:
        import pyarrow as pa  # type: ignore[import-untyped]  # ships no stubs

        file = pa.CompressedInputStream(file, codec)
    if suffix not in (".csv", ".json"):
        yield from iter(lambda: file.read(CHUNK), b"")
        return
    # What is no UTF-8 stays as it is: it makes one record unusable, not the file.
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    for line in (_rows if suffix == ".csv" else _listed)(text):
        yield line.encode("utf-8", "surrogateescape")


def _rows(text: io.TextIOWrapper) -> Iterator[str]:
    """Yield the rows of a table as lines of JSON."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    rows = csv.DictReader(text, strict=True)
    for row in rows:
        if None in row:
            raise ValueError(f"line {rows.line_num} has more cells than the first line: quote its commas")
        yield json.dumps(row, ensure_ascii=False) + "\n"


def _listed(text: io.TextIOWrapper) -> Iterator[str]:
    """Yield the items of a JSON list, each on a line; of a file that is no list, its own lines."""
    decoder, count = json.JSONDecoder(parse_int=str, parse_float=str), 0
    rest = text.read(CHUNK).lstrip()
    if not rest.startswith("["):
        while rest:
            yield rest
            rest = text.read(CHUNK)
        return
    rest, at, closing = rest[1:], 0, ","
    while closing == ",":
        try:
            begin = _SPACE.match(rest, at).end()  # type: ignore[union-attr]  # it matches nothing too
            end = begin if not count and rest[begin] == "]" else decoder.raw_decode(rest, begin)[1]
            behind = _SPACE.match(rest, end).end()  # type: ignore[union-attr]  # likewise
            closing = rest[behind]
        except (ValueError, IndexError) as error:  # it may be cut where the text so far ends
            more = "" if len(rest) - at > MAX_RECORD_BYTES else text.read(max(CHUNK, len(rest) - at))
            if not more:
                raise ValueError(f"item {count + 1} of its list is no whole JSON value: {first_line(error)}") from error
            rest, at = rest[at:] + more, 0
            continue
        if end > begin:
            yield rest[begin:end].replace("\n", " ").replace("\r", " ") + "\n"
        at, count = behind + 1, count + 1
    if closing != "]" or (rest[at:] + text.read(CHUNK)).strip():
        raise ValueError(f"its list does not end behind item {count}, or is not all of it")


def check_decoded(decoded: int, packed: int, what: str, *, largest: int = _LARGEST_BYTES) -> None:
    """Refuse what decodes to much more than its bytes.

    Args:
        decoded: Bytes so far.
        packed: Bytes that are decoded.
        what: What it is, for the message.
        largest: Bytes at most, whatever is packed.

    Raises:
        InputError: It does.
    """
    if decoded > _SMALL_BYTES and (decoded > largest or decoded > _LARGEST_RATIO * packed):
        raise InputError(
            f"{what} decodes to {decoded} bytes from {packed}: write the file again, with smaller row groups or less "
            "compression"
        )


def open_binary(path: Path) -> Any:
    """Open a file for reading bytes.

    Raises:
        InputError: It cannot be opened.
    """
    with os_errors_as(InputError, f"cannot read the data file {path}"):
        return os.fdopen(open_regular(path), "rb")
