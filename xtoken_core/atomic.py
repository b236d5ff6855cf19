"""Atomic, durable writes: a file or directory appears whole or not at all, and survives a power failure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary file to write instead of `path`; move it there when the block ends without an error.

    The temporary file lies beside its target, because a rename is only atomic within one file system. It is synced
    before the rename: otherwise a power failure could leave the name without the bytes.

    Args:
        path: The file to replace; unchanged if the block raises.

    Yields:
        Where to write.

    Raises:
        OSError: It cannot be synced or moved.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield scratch
        sync(scratch)
        scratch.replace(path)
        sync(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all.

    Args:
        path: The file to create or replace.
        content: Text, written as UTF-8, or bytes.

    Raises:
        OSError: It cannot be written; what was there stays.
    """
    with atomic_path(path) as scratch:
        scratch.unlink(missing_ok=True)
        with scratch.open("xb") as file:  # a new file: a link of this name would lead the bytes elsewhere
            file.write(content.encode() if isinstance(content, str) else content)


def atomic_rename(source: Path, target: Path) -> None:
    """Rename a finished file or directory, and make the new name durable.

    Raises:
        OSError: It cannot be renamed.
    """
    source.rename(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Flush every file below a directory to the disk, and then the directories' entries."""
    for path in directory.rglob("*"):
        sync(path)
    sync(directory)
