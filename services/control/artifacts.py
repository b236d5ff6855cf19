"""The files of a run, listed and opened so that no name and no symbolic link leads out of its directory."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

LEFT_OUT = ("cache",)
DEEPEST = 16


def listed(output: Path, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """Files with their sizes and times, by path, and whether there are more than `limit`.

    Hidden files, symbolic links and the caches are left out.
    """
    found: list[dict[str, Any]] = []
    for path, status in _walk(output, 0):
        if len(found) == limit:
            return found, True
        modified = datetime.fromtimestamp(status.st_mtime, UTC).isoformat(timespec="seconds")
        found.append({"path": path.relative_to(output).as_posix(), "bytes": status.st_size, "modified": modified})
    return found, False


def open_file(output: Path, path: str) -> int:
    """A descriptor of a regular file below a run's directory, no step of the way being a symbolic link.

    Raises:
        FileNotFoundError: There is no such file, or the path is not one of those that are listed.
    """
    parts = path.split("/")
    if any(part == "" or part.startswith(".") or "\0" in part for part in parts) or parts[0] in LEFT_OUT:
        raise FileNotFoundError(path)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    place = os.open(output, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = os.open(part, flags | os.O_DIRECTORY, dir_fd=place)
            os.close(place)
            place = inner
        file = os.open(parts[-1], flags, dir_fd=place)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(path) from error
    finally:
        os.close(place)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise FileNotFoundError(path)
    return file


def _walk(place: Path, depth: int) -> Iterator[tuple[Path, os.stat_result]]:
    try:
        with os.scandir(place) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in found:
        hidden = entry.name.startswith(".") or (depth == 0 and entry.name in LEFT_OUT)
        if hidden or entry.is_symlink():
            continue
        if entry.is_dir():
            if depth < DEEPEST:
                yield from _walk(Path(entry.path), depth + 1)
        elif entry.is_file():
            try:
                yield Path(entry.path), entry.stat(follow_symlinks=False)
            except OSError:
                continue
