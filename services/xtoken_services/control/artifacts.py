"""Files of a run, listed and opened without following a name or symbolic link out of its directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xtoken_core.regular_files import open_below
from xtoken_services.supervisor.json_files import encodable

EXCLUDED = ("cache",)
MAX_FILES = 10_000
MAX_DEPTH = 16
MAX_TIME_S = 253_402_300_799
"""The last second of year 9999."""


def list_files(output: Path) -> tuple[list[dict[str, Any]], bool]:
    """List the files of a run without hidden files, symbolic links and caches.

    Returns:
        Path, size and modification time of each file, ordered by path; and True if there are more than `MAX_FILES`.
    """
    files: list[dict[str, Any]] = []
    for path, status in _walk(output, 0):
        if len(files) == MAX_FILES:
            return files, True
        # Any program may have set the time, also to one beyond year 9999, which datetime cannot express.
        seconds = min(max(status.st_mtime, 0), MAX_TIME_S)
        modified = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
        files.append({"path": path.relative_to(output).as_posix(), "bytes": status.st_size, "modified": modified})
    return files, False


def open_file(output: Path, path: str) -> int:
    """Open a regular file below a run's directory without following symbolic links.

    Returns:
        A file descriptor.

    Raises:
        FileNotFoundError: There is no such file, or `list_files` would leave it out.
    """
    parts = path.split("/")
    if any(part.startswith(".") for part in parts) or parts[0] in EXCLUDED:
        raise FileNotFoundError(path)
    try:
        return open_below(output, path)
    except OSError as error:
        raise FileNotFoundError(path) from error


def _walk(directory: Path, depth: int) -> Iterator[tuple[Path, os.stat_result]]:
    try:
        with os.scandir(directory) as entries:
            entries_by_name = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries_by_name:
        hidden = entry.name.startswith(".") or (depth == 0 and entry.name in EXCLUDED) or not encodable(entry.name)
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
