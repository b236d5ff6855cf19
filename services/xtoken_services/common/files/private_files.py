"""Files and directories that only this user may have written: owner, mode and links are checked. No torch."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xtoken_core.errors import InputError
from xtoken_core.regular_files import IrregularFileError, access_of_others, open_below, read_open

CONTROL_TOKEN = "xtoken/control.token"
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_private_directory(path: Path) -> None:
    """Refuse a directory that another user owns or may write to.

    Args:
        path: The directory.

    Raises:
        InputError: Another user owns it or may write to it.
        OSError: It is a symbolic link or no directory, or cannot be read.
    """
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise IrregularFileError("a symbolic link or not a directory", path)
    _check_writers(path, status, 0o700)


@contextmanager
def open_private(root: Path, name: str) -> Iterator[int]:
    """Open a regular file that this user owns, only this user may write to, and that has no second name.

    Args:
        root: Its directory.
        name: Its name there.

    Yields:
        A descriptor for reading.

    Raises:
        InputError: Others may write to it.
        OSError: It cannot be opened, or is no regular file.
    """
    descriptor = open_below(root, name)
    try:
        status = os.fstat(descriptor)
        if status.st_nlink != 1:
            raise InputError(f"{root / name} has {status.st_nlink} hard links: replace it by a copy that has one")
        _check_writers(root / name, status, 0o600)
        yield descriptor
    finally:
        os.close(descriptor)


def read_private(root: Path, name: str, limit: int) -> bytes:
    """Return a private file's content.

    Args:
        root: As for `open_private`.
        name: Likewise.
        limit: Greatest size in bytes.

    Raises:
        InputError: Others may write to it.
        OSError: It cannot be read, is no regular file, or is larger.
    """
    with open_private(root, name) as descriptor:
        return read_open(os.dup(descriptor), limit, root / name)


def control_token_file() -> Path:
    """Return the file with the token of this user's control planes; their commands read it too."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", CONTROL_TOKEN)


def _check_writers(path: Path, status: os.stat_result, mode: int) -> None:
    """Refuse what another user owns or may write to.

    Raises:
        InputError: It is.
    """
    if access_of_others(status, OTHERS_WRITE):
        raise InputError(
            f"others may write to {path}: make sure that its content is yours, then chown it and chmod {mode:o} it"
        )
