"""The record of a split text, outside the run's cache: a control plane's run has no run file that names the text.

Where the cache has been left out of a backup, both parts are made again from the files in the record, and are refused
unless they are the same, byte for byte.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from xtoken_core.atomic import atomic_write
from xtoken_core.config.base import ConfigModel
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import InputError, OutputError, XtokenError
from xtoken_core.regular_files import JSON_LIMIT, MIB, open_below, read_below
from xtoken_services.common.files.allowed_paths import Roots, check_allowed
from xtoken_services.common.run.resume import check_output
from xtoken_services.common.text.held_out import ORIGIN, divide, origin_of, split_directory, split_output, split_parts

FILE = "split.json"
BLOCK_BYTES = 16 * MIB
CHECKING, RESTORING = "reading the split text", "splitting the text again"

Progress = Callable[[str, float], None]
"""Takes what takes long, in words, and the part (0 to 1) of it that is done. It may raise to stop."""


class SplitRecord(ConfigModel):
    """Origin of a split text, and digests of its parts.

    Attributes:
        origin: Paths, sizes and times of the text's files, as in the file `origin` beside the parts.
        parts: SHA-256 of the text to train on, and of the text that is held back.
    """

    version: Literal[1] = 1
    origin: str
    parts: tuple[str, str]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files of the text."""
        return tuple(Path(line.rsplit(" ", 2)[0]) for line in self.origin.split("\n") if line)


def record_split(run: ResolvedRun, progress: Progress) -> None:
    """Record in a run's directory what its text was split from; do nothing for a text that is another run's, or whole.

    Nothing is recorded either where checkpoints were made from another text.

    Args:
        run: The run.
        progress: Called while the parts are read for the first time.

    Raises:
        InputError: A part cannot be read.
        OutputError: The record cannot be written.
    """
    spec = run.spec
    output = split_output(spec.data.paths)
    if output is None or output != spec.output:
        return
    try:
        check_output(run)
    except XtokenError:
        return  # the start is refused for it later, before anything else is written
    directory = split_directory(output)
    try:
        origin = read_below(directory, ORIGIN, JSON_LIMIT).decode()
    except (OSError, ValueError):
        return  # without it there is nothing to record
    try:
        earlier = _read(output)
    except InputError:
        earlier = None
    if earlier is not None and earlier.origin == origin:
        return
    parts = _digests(split_parts(directory, spec.data.paths[0].suffix), progress)
    try:
        atomic_write(output / FILE, SplitRecord(origin=origin, parts=parts).model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise OutputError(f"cannot write {output / FILE}: {error.strerror}") from error


def restore_split(spec: RunSpec, progress: Progress) -> None:
    """Make the parts of a run's text again if one is not in the cache, and the run's directory has a record of them.

    Args:
        spec: The run.
        progress: Called while the text is read.

    Raises:
        InputError: The text is not what the parts were made from, or cannot be read; or the record is damaged.
        OutsideError: The text or the cache lies outside the roots of this process.
        OutputError: The parts cannot be written.
    """
    output = split_output(spec.data.paths)
    if output is None:
        return
    directory = split_directory(output)
    parts = split_parts(directory, spec.data.paths[0].suffix)
    record = None if all(part.exists() for part in parts) else _read(output)
    if record is None:
        return
    roots = Roots.of_environment()
    if roots is not None:
        roots.check(directory, "output", write=True)
    for path in record.paths:
        if not check_allowed(path, "data.path").is_file():
            raise InputError(f"{path}, of which this run has held a part back, is not there: restore it or {directory}")
    # Named after the run, which only one process starts at a time: a start that was killed has left a part of the text.
    scratch = directory / f".{hashlib.sha256(bytes(spec.output)).hexdigest()[:16]}"
    made, origin = split_parts(scratch, parts[0].suffix), scratch / ORIGIN
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        divide(record.paths, made, lambda done: progress(RESTORING, done))
        if _digests(made, progress) != record.parts:
            texts = ", ".join(map(str, record.paths))
            raise InputError(f"{texts} is no longer the text that this run began with: restore it or {directory}")
        atomic_write(origin, origin_of(record.paths))
        for path, part in zip((*made, origin), (*parts, directory / ORIGIN), strict=True):
            path.replace(part)
    except OSError as error:
        raise OutputError(f"cannot split the text again into {directory}: {error.strerror}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _read(output: Path) -> SplitRecord | None:
    """Return the record in a run's directory; None if there is none.

    Raises:
        InputError: It cannot be read.
    """
    try:
        return SplitRecord.model_validate_json(read_below(output, FILE, JSON_LIMIT))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise InputError(f"{output / FILE} is damaged, or of another version of xtoken: restore it") from error


def _digests(parts: tuple[Path, Path], progress: Progress) -> tuple[str, str]:
    """Return the SHA-256 of both parts.

    Raises:
        InputError: One cannot be read.
    """
    first, second = (_digest(path, lambda done: progress(CHECKING, done)) for path in parts)
    return first, second


def _digest(path: Path, advance: Callable[[float], None]) -> str:
    digest, done = hashlib.sha256(), 0
    try:
        with os.fdopen(open_below(path.parent, path.name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                done += len(block)
                advance(done / max(size, done))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()
