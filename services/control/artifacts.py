"""Files of a run, listed and opened without following a name or symbolic link out of its directory."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

EXCLUDED = ("cache",)
MAX_DEPTH = 16


def list_files(output: Path, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """List the files of a run without hidden files, symbolic links and caches.

    Returns:
        Path, size and modification time of each file, ordered by path; and True if there are more than `limit`.
    """
    files: list[dict[str, Any]] = []
    for path, status in _walk(output, 0):
        if len(files) == limit:
            return files, True
        modified = datetime.fromtimestamp(status.st_mtime, UTC).isoformat(timespec="seconds")
        files.append({"path": path.relative_to(output).as_posix(), "bytes": status.st_size, "modified": modified})
    return files, False


def open_file(output: Path, path: str) -> int:
    """Open a regular file below a run's directory without following symbolic links.

    Every directory of the path is opened relative to its parent with `O_NOFOLLOW`, so that no link can be swapped in
    between a check and the open.

    Returns:
        A file descriptor.

    Raises:
        FileNotFoundError: There is no such file, or `list_files` would leave it out.
    """
    parts = path.split("/")
    if any(part == "" or part.startswith(".") or "\0" in part for part in parts) or parts[0] in EXCLUDED:
        raise FileNotFoundError(path)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    directory = os.open(output, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = os.open(part, flags | os.O_DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = inner
        file = os.open(parts[-1], flags, dir_fd=directory)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(path) from error
    finally:
        os.close(directory)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise FileNotFoundError(path)
    return file


def _walk(directory: Path, depth: int) -> Iterator[tuple[Path, os.stat_result]]:
    try:
        with os.scandir(directory) as entries:
            entries_by_name = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries_by_name:
        hidden = entry.name.startswith(".") or (depth == 0 and entry.name in EXCLUDED)
        if hidden or entry.is_symlink():
            continue
        if entry.is_dir():
            if depth < MAX_DEPTH:
                yield from _walk(Path(entry.path), depth + 1)
        elif entry.is_file():
            try:
                yield Path(entry.path), entry.stat(follow_symlinks=False)
            except OSError:
                continue
