"""Locks of directories: one run at a time writes to an output, one process serves a directory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xtoken_core.errors import XtokenError, os_errors_as


class OccupiedError(XtokenError):
    """Another run writes to the same directory."""

    status = 409


def lock(place: Path, flags: int, taken: XtokenError) -> int:
    """Open a file or directory and lock it; return its descriptor, with which the lock goes, however this process ends.

    Args:
        place: The file or directory.
        flags: For `os.open`.
        taken: Error if another process holds the lock.

    Raises:
        OSError: It cannot be opened.
        XtokenError: `taken`.
    """
    handle = os.open(place, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise taken from error
    return handle


@contextmanager
def sole_owner(output: Path) -> Iterator[None]:
    """Lock a run's output directory, which is created for this user alone if it is missing.

    Raises:
        OccupiedError: Another run writes there.
        XtokenError: It cannot be created.
    """
    with os_errors_as(XtokenError, f"cannot create the output directory {output}"):
        output.mkdir(mode=0o700, parents=True, exist_ok=True)
        taken = OccupiedError(f"another run is writing to {output}: stop it, or choose another output")
        handle = lock(output, os.O_RDONLY | os.O_DIRECTORY, taken)  # the directory itself: no file is needed
    try:
        yield
    finally:
        os.close(handle)
