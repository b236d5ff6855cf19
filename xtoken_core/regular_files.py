"""Opening and reading of files that other processes or users have written: regular files only, of bounded size.

Any process that can write to a directory decides what a name in it is: a FIFO, on which an open blocks, a device, or a
symbolic link to a file outside. Every read of such a file goes through this module.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MIB = 1 << 20
JSON_LIMIT = 64 * MIB
"""Default limit of a JSON file: the index of a model with a hundred thousand tensors has 10 MiB."""
TOKENIZER_LIMIT = 256 * MIB
"""Limit of a tokenizer's file: the largest vocabularies have 40 MiB."""
MAX_NAMES = 100_000
"""Largest number of names that are listed from one directory."""
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class IrregularFileError(OSError):
    """A file is no regular file, lies outside its root, or is larger than its limit; `strerror` states which."""

    def __init__(self, reason: str, path: str | Path) -> None:
        super().__init__(errno.EINVAL, reason, str(path))


def open_regular(path: Path, *, within: Sequence[Path] | None = None) -> int:
    """Open a file that a user names. Symbolic links are resolved first; none is followed after that.

    Args:
        path: The file.
        within: Directories, absolute and without links, below one of which it must lie; None for any.

    Returns:
        A file descriptor for reading.

    Raises:
        OSError: It cannot be opened, is no regular file, or lies outside the directories.
    """
    try:
        target = path.resolve(strict=True)
    except (RuntimeError, ValueError) as error:  # a loop of links, a null byte
        raise IrregularFileError("not a usable path", path) from error
    if within is not None and not any(target.is_relative_to(root) for root in within):
        raise IrregularFileError("it leads out of the allowed directories", path)
    return _open(Path(target.anchor), target.parts[1:], path)


def open_below(root: Path, name: str) -> int:
    """Open a file by its path below a directory, without following any symbolic link below it.

    Args:
        root: The directory; it may be reached through links.
        name: Relative path with `/`, without `..`.

    Returns:
        A file descriptor for reading.

    Raises:
        OSError: It cannot be opened, or is no regular file.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise IrregularFileError("not a path below its directory", root / name.replace("\0", "?"))
    return _open(root, parts, root / name)


def append_regular(path: Path) -> int:
    """Open a file to append to it; create it if it is missing. Neither it nor its directory may be a symbolic link.

    Args:
        path: The file.

    Returns:
        A file descriptor for writing.

    Raises:
        OSError: It cannot be opened, or is no regular file.
    """
    directory = os.open(path.parent, _STEP)
    try:
        return _open_in(directory, path.name, _APPEND, path)
    finally:
        os.close(directory)


def read_regular(path: Path, limit: int, *, within: Sequence[Path] | None = None) -> bytes:
    """Return the content of a file that a user names; see `open_regular`.

    Args:
        path: The file.
        limit: Largest size in bytes.
        within: As for `open_regular`.

    Raises:
        OSError: It cannot be read, is no regular file, or is larger than the limit.
    """
    return read_open(open_regular(path, within=within), limit, path)


def read_below(root: Path, name: str, limit: int) -> bytes:
    """Return the content of a file below a directory; see `open_below`.

    Args:
        root: The directory.
        name: Relative path.
        limit: Largest size in bytes.

    Raises:
        OSError: It cannot be read, is no regular file, or is larger than the limit.
    """
    return read_open(open_below(root, name), limit, root / name)


def read_open(descriptor: int, limit: int, shown: Path) -> bytes:
    """Return the content of an open file, which is closed.

    Raises:
        OSError: It cannot be read, or is larger than the limit.
    """
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise IrregularFileError(f"larger than {limit} bytes", shown)
    return data


def access_of_others(status: os.stat_result, rights: int = 0o077) -> str:
    """Describe the access of others to a file, by its owner or its mode; an empty text if they have none.

    Args:
        status: Of the open file.
        rights: Bits of the mode that others may not have.
    """
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, this process to user {os.geteuid()}"
    return f"is open to other users (mode {mode:04o})" if mode & rights else ""


def read_json_object(path: Path, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """Return the JSON object in a file that a user names.

    Raises:
        OSError: It cannot be read; see `read_regular`.
        ValueError: It holds no JSON object; the text is the reason.
    """
    return parse_object(read_regular(path, limit))


def json_object_or_empty(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file that a user names; empty if the file cannot be read or holds something else."""
    try:
        return read_json_object(path)
    except (OSError, ValueError):
        return {}


def parse_object(data: bytes | str) -> dict[str, Any]:
    """Return the JSON object in a text.

    Raises:
        ValueError: It is no JSON object; the text is the reason.
    """
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def names_below(root: Path, directory: str) -> list[str]:
    """Return the sorted names of the regular files directly in a directory below `root`; none if it is a link.

    Args:
        root: As for `open_below`.
        directory: Name of one directory in it.
    """
    try:
        outer = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            inner = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=outer)
        finally:
            os.close(outer)
        try:
            with os.scandir(inner) as entries:
                files = (entry.name for entry in entries if entry.is_file(follow_symlinks=False))
                return sorted(name for name, _ in zip(files, range(MAX_NAMES), strict=False))
        finally:
            os.close(inner)
    except OSError:
        return []


def proc_path(descriptor: int) -> str:
    """Return a path that opens the file behind a descriptor, whatever has its name meanwhile."""
    return f"/proc/self/fd/{descriptor}"


@contextmanager
def descriptor_path(path: Path, *, within: Sequence[Path] | None = None) -> Iterator[Path]:
    """Open a file and yield a path to its descriptor, for a library that opens files by name.

    Args:
        path: The file.
        within: As for `open_regular`.

    Raises:
        OSError: See `open_regular`.
    """
    descriptor = open_regular(path, within=within)
    try:
        yield Path(proc_path(descriptor))
    finally:
        os.close(descriptor)


def _open(root: Path, parts: Sequence[str], shown: Path) -> int:
    # Each directory is opened relative to its parent, so that no link can be swapped in between a check and the open.
    directory = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = os.open(part, _STEP, dir_fd=directory)
            os.close(directory)
            directory = inner
        return _open_in(directory, parts[-1] if parts else ".", _FLAGS, shown)
    except OSError as error:
        error.filename = str(shown)
        raise
    finally:
        os.close(directory)


def _open_in(directory: int, name: str, flags: int, shown: Path) -> int:
    try:
        file = os.open(name, flags, 0o666, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket, or a FIFO that nothing reads
            raise IrregularFileError("not a regular file", shown) from error
        raise OSError(error.errno, error.strerror, str(shown)) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise IrregularFileError("not a regular file", shown)
    return file
