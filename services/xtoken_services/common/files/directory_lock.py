"""The lock of a run's output directory: one run at a time writes there."""

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


@contextmanager
def sole_owner(output: Path) -> Iterator[None]:
    """Lock a run's output directory, which is created for this user alone if it is missing.

    Raises:
        OccupiedError: Another run writes there.
        XtokenError: It cannot be created.
    """
    with os_errors_as(XtokenError, f"cannot create the output directory {output}"):
        output.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # The lock is on the directory itself: it needs no file, and the kernel drops it however this process ends.
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OccupiedError(f"another run is writing to {output}: stop it, or choose another output") from error
        yield
    finally:
        os.close(handle)
