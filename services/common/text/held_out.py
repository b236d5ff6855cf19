"""Text that is held back for evaluation, chosen by a hash of each record. No torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from xtoken_core.atomic import atomic_write
from xtoken_core.errors import OutputError

LINES = (".jsonl", ".txt")
"""Forms of which a line is a record."""
PERCENT = 2
MOST_HELD_OUT = 4 << 20
"""Bytes that are held back at most."""
TRAIN, HELD_OUT, ORIGIN = "train", "held-out", "origin"


def split_text(paths: Sequence[Path], directory: Path, *, writes: bool) -> tuple[Path, Path, str] | None:
    """Split files of lines into text to train on and text that is held back.

    A record is held back by a hash of its line, so that the choice does not depend on its position, and equal records
    are on one side. The files are written once; a later call with the same text finds them.

    Args:
        paths: The text.
        directory: Where the two files are written.
        writes: False: only name the files.

    Returns:
        The two files and a line that describes the choice; None if the text has another form, cannot be read, or is
        too short to hold anything back.

    Raises:
        OutputError: The files cannot be written.
    """
    suffixes = {path.suffix.lower() for path in paths}
    if len(suffixes) != 1 or not suffixes <= set(LINES) or not all(path.is_file() for path in paths):
        return None
    suffix = suffixes.pop()
    train, held_out = directory / (TRAIN + suffix), directory / (HELD_OUT + suffix)
    note = f"{PERCENT}% of the records, chosen by a hash of their text, in {held_out}"
    if not writes:
        return train, held_out, note
    origin = "\n".join(f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths) + "\n"
    marker = directory / ORIGIN
    if not (marker.is_file() and marker.read_text(encoding="utf-8") == origin):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not _write(paths, train, held_out):
                return None
            atomic_write(marker, origin)
        except OSError as error:
            raise OutputError(f"cannot write the held-out text below {directory}: {error.strerror}") from error
    return train, held_out, note


def is_held_out(line: bytes) -> bool:
    """Return True for a record that is held back."""
    return int.from_bytes(hashlib.sha256(line.strip()).digest()[:8], "big") % 100 < PERCENT


def _write(paths: Sequence[Path], train: Path, held_out: Path) -> bool:
    """Write both files; False if one would be empty."""
    size = kept = 0
    temporary = [path.with_name(f".{path.name}.{os.getpid()}") for path in (train, held_out)]
    with temporary[0].open("wb") as to_train, temporary[1].open("wb") as to_evaluate:
        for path in paths:
            with path.open("rb") as source:
                for line in source:
                    whole = line if line.endswith(b"\n") else line + b"\n"
                    if line.strip() and size < MOST_HELD_OUT and is_held_out(line):
                        size += to_evaluate.write(whole)
                    else:
                        kept += to_train.write(whole)
        for file in (to_train, to_evaluate):
            file.flush()
            os.fsync(file.fileno())
    for written, path in zip(temporary, (train, held_out), strict=True):
        if size and kept:
            written.replace(path)
        else:
            written.unlink()
    return bool(size and kept)
