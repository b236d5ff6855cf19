"""File of the control plane's database: private to its user, created whole, and checked while it is served.

The file is never opened here except by SQLite: closing a descriptor of it would drop this process's locks.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import stat
import time
from collections.abc import Callable
from pathlib import Path

from xtoken_core.errors import XtokenError

REMEDY = "restore it from a backup, or move it away to start without the runs in it"
SIDE_FILES = ("-wal", "-shm", "-journal")
CHECK_S = 5.0
CHECK_FRACTION = 100.0
"""A check of the content is repeated after this many times its own duration, at the earliest after `CHECK_S`."""


class StoreError(XtokenError):
    """The database cannot be read or written."""

    status = 503


def create_private(path: Path, create: Callable[[Path], None]) -> None:
    """Create a database for this user alone: whole or not at all, so that a later empty file is known to be damaged.

    Args:
        path: The file; nothing is done if it exists.
        create: Writes a new database to the file that it is given.

    Raises:
        StoreError: It cannot be created.
    """
    if os.path.lexists(path):
        return
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        os.close(os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            create(scratch)
            os.link(scratch, path)
        except FileExistsError:  # another process was first
            pass
        finally:
            for name in ("", *SIDE_FILES):
                Path(f"{scratch}{name}").unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"cannot create the control plane's database {path}: {error.strerror}") from error


class DatabaseFile:
    """An existing database file.

    Args:
        path: The file. Its mode is changed to 0600 if other users may read it.

    Raises:
        StoreError: It is empty or damaged, is no regular file, or belongs to another user.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        status = self._status()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise StoreError(f"the control plane's database {path} must be a regular file of this user")
        self._inode, self._size = status.st_ino, 0
        for name in ("", *SIDE_FILES):
            file = Path(f"{path}{name}")
            if file.is_file() and not file.is_symlink() and stat.S_IMODE(file.stat().st_mode) & 0o077:
                file.chmod(0o600)
        self._check_at = 0.0
        self.check()

    def check(self) -> None:
        """Check that the file is still there, has not shrunk and, every few seconds, that its content is sound.

        Raises:
            StoreError: It is not; the text names the file.
        """
        status = self._status()
        if status.st_ino != self._inode:
            raise StoreError(f"the control plane's database {self._path} was replaced while it was served: {REMEDY}")
        if status.st_size == 0:
            raise StoreError(f"the control plane's database {self._path} is empty: {REMEDY}")
        if status.st_size < self._size:  # SQLite never shortens it: nothing here vacuums
            raise StoreError(f"the control plane's database {self._path} was cut short: {REMEDY}")
        self._size = status.st_size
        if time.monotonic() >= self._check_at:
            began = time.monotonic()
            self._check_content()
            self._check_at = time.monotonic() + max(CHECK_S, CHECK_FRACTION * (time.monotonic() - began))

    def _check_content(self) -> None:
        try:
            # A connection of its own has no cached pages, which would hide damage on the disk.
            connection = sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=rw", uri=True)
            try:
                answer = connection.execute("PRAGMA quick_check(1)").fetchone()
            finally:
                connection.close()
        except sqlite3.OperationalError as error:
            raise StoreError(f"the control plane's database {self._path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise StoreError(f"the control plane's database {self._path} is damaged: {error}: {REMEDY}") from error
        if answer != ("ok",):
            reason = str(answer[0] if answer else "no answer").splitlines()[0]
            raise StoreError(f"the control plane's database {self._path} is damaged: {reason}: {REMEDY}")

    def _status(self) -> os.stat_result:
        try:
            return self._path.lstat()
        except OSError as error:
            raise StoreError(f"the control plane's database {self._path}: {error.strerror}: {REMEDY}") from error
