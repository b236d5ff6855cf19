"""Text that is held back for evaluation, chosen by a hash of each record. No torch."""

from __future__ import annotations

import filecmp
import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from xtoken_core.atomic import atomic_write
from xtoken_core.errors import OutputError
from xtoken_services.common.files.directory_lock import sole_owner

LINES = (".jsonl", ".txt")
"""Forms of which a line is a record."""
PERCENT = 2
MOST_HELD_OUT = 4 << 20
"""Bytes that are held back at most."""
REPORT_BYTES = 16 << 20
"""Bytes that are read between two reports of progress."""
TRAIN, HELD_OUT, ORIGIN = "train", "held-out", "origin"
MADE_OUTPUT = "made-output"
"""File that stands for: the output directory was made for the split text, not by the user."""


def split_text(paths: Sequence[Path], output: Path, *, writes: bool) -> tuple[Path, Path, str] | None:
    """Split files of lines into text to train on and text that is held back.

    A record is held back by a hash of its line, so that the choice does not depend on its position, and equal records
    are on one side. The files are written once; a later call with the same text finds them, or makes them again where
    the run's cache has been left out of a copy.

    Args:
        paths: The text.
        output: Output directory of the run, in whose cache the two files are written.
        writes: False: only name the files.

    Returns:
        The two files and a line that describes the choice; None if the text has another form, cannot be read, or is
        too short to hold anything back.

    Raises:
        OutputError: The files cannot be written.
        OccupiedError: They are of another text, and a run that reads them is active.
    """
    suffixes = {path.suffix.lower() for path in paths}
    if len(suffixes) != 1 or not suffixes <= set(LINES) or not all(path.is_file() for path in paths):
        return None
    directory = split_directory(output)
    train, held_out = split_parts(directory, suffixes.pop())
    note = f"{PERCENT}% of the records, chosen by a hash of their text, in {held_out}"
    if writes and not is_split(paths, output):
        is_new = not output.exists()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if is_new:
                (directory / MADE_OUTPUT).touch()
            if not _write(paths, (train, held_out), output):
                return None
            atomic_write(directory / ORIGIN, origin_of(paths))
        except OSError as error:
            raise OutputError(f"cannot write the held-out text below {directory}: {error.strerror}") from error
    return train, held_out, note


def split_directory(output: Path) -> Path:
    """Return the directory of both parts of a run's text."""
    return output / "cache" / "split"


def split_parts(directory: Path, suffix: str) -> tuple[Path, Path]:
    """Return the files of the text to train on and of the text that is held back, for a text with this suffix."""
    return directory / (TRAIN + suffix), directory / (HELD_OUT + suffix)


def split_output(paths: Sequence[Path]) -> Path | None:
    """Return the output directory of the run in whose cache a text was split; None for a whole text."""
    if len(paths) != 1 or paths[0].stem != TRAIN:
        return None
    output = paths[0].parent.parent.parent
    return output if split_directory(output) == paths[0].parent else None


def made_for_split(output: Path) -> bool:
    """Return True if a run's output directory was made for its split text."""
    return (split_directory(output) / MADE_OUTPUT).exists()


def is_split(paths: Sequence[Path], output: Path) -> bool:
    """Return True if both parts of a text are there already, by the paths, sizes and times of its files."""
    directory = split_directory(output)
    try:
        parts = {path.stem for path in directory.iterdir()}
        return {TRAIN, HELD_OUT} <= parts and (directory / ORIGIN).read_text(encoding="utf-8") == origin_of(paths)
    except (OSError, ValueError):
        return False


def is_held_out(line: bytes) -> bool:
    """Return True for a record that is held back."""
    return int.from_bytes(hashlib.sha256(line.strip()).digest()[:8], "big") % 100 < PERCENT


def origin_of(paths: Sequence[Path]) -> str:
    """Return the paths, sizes and times of a text's files, one line each.

    Raises:
        OSError: One is not there.
    """
    states = ((path.resolve(), path.stat()) for path in paths)
    return "".join(f"{path} {state.st_size} {state.st_mtime_ns}\n" for path, state in states)


def _write(paths: Sequence[Path], targets: tuple[Path, Path], output: Path) -> bool:
    """Write both files, unless they are there with the same content; False if one would be empty."""
    temporary = [path.with_name(f".{path.name}.{os.getpid()}") for path in targets]
    try:
        if not divide(paths, (temporary[0], temporary[1])):
            return False
        present = [path.is_file() for path in targets]
        if all(present) and all(map(_are_equal, temporary, targets)):
            return True
        with sole_owner(output) if any(present) else nullcontext():
            for written, path in zip(temporary, targets, strict=True):
                written.replace(path)
        return True
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


def _are_equal(path: Path, other: Path) -> bool:
    return filecmp.cmp(path, other, shallow=False)


def divide(
    paths: Sequence[Path], targets: tuple[Path, Path], progress: Callable[[float], None] = lambda _: None
) -> bool:
    """Write the lines of a text to two files.

    Args:
        paths: The text.
        targets: The file of what is trained on, and the file of what is held back.
        progress: Called at times with the part (0 to 1) of the text that is read; it may raise to stop.

    Returns:
        False if one of them is empty.

    Raises:
        OSError: A file cannot be read or written.
    """
    size = kept = read = noted = 0
    total = sum(path.stat().st_size for path in paths)
    with targets[0].open("wb") as to_train, targets[1].open("wb") as to_evaluate:
        for path in paths:
            with path.open("rb") as source:
                for line in source:
                    whole = line if line.endswith(b"\n") else line + b"\n"
                    if line.strip() and size < MOST_HELD_OUT and is_held_out(line):
                        size += to_evaluate.write(whole)
                    else:
                        kept += to_train.write(whole)
                    read += len(line)
                    if read - noted > REPORT_BYTES:
                        noted = read
                        progress(read / max(total, read))
        for file in (to_train, to_evaluate):
            file.flush()
            os.fsync(file.fileno())
    return bool(size and kept)
