"""Files in shared memory, safe against other users and crashes. No torch.

A file's owner holds a lock on it (`flock`) as long as it lives: the kernel releases it however the process ends, so a
file that can be locked has lost its owner. A process id could be another's by now, or mean nothing in a container.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from pathlib import Path

from xtoken_core.errors import InputError, os_errors_as
from xtoken_core.regular_files import access_of_others, open_below
from xtoken_core.transports.ring import SignalError

DIRECTORY = Path("/dev/shm")
PREFIX = "xtoken-ring-"
WEIGHTS_PREFIX = "xtoken-weights-"
PATTERNS = (f"{PREFIX}*", f"{WEIGHTS_PREFIX}*", f".{WEIGHTS_PREFIX}*")
"""Names of files that are swept; one that begins with a dot was being written."""


def create_file(size: int, *, run: str, session: str, directory: Path = DIRECTORY) -> tuple[int, Path]:
    """Create a file of mode 0600 with its memory reserved, locked by this process until the descriptor closes.

    Args:
        size: Bytes, all reserved now, so that a full directory shows here and not as a SIGBUS later.
        run: Name of the run, for the people who look into the directory.
        session: The producer's session, likewise.
        directory: Where to make it.

    Returns:
        The open descriptor (the lock belongs to it) and the path.

    Raises:
        InputError: If the directory is missing, not writable, or has no room for `size` bytes.
    """
    label = "-".join(re.sub(r"[^A-Za-z0-9_.]+", "_", part)[:40] for part in (run, session))
    path = directory / f"{PREFIX}{label}-{os.getpid()}-{secrets.token_hex(8)}"
    with os_errors_as(InputError, f"cannot make a file in {directory}"):
        fd = create_locked(path)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        os.close(fd)
        raise _no_room(size, directory, error) from error
    return fd, path


def create_locked(path: Path) -> int:
    """Create a file of mode 0600, in the place of any other, and lock it; the lock is the descriptor's.

    Raises:
        OSError: It cannot be created.
    """
    while True:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # a sweep removed it in the moment before the lock


def _no_room(size: int, directory: Path, error: OSError) -> InputError:
    if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
        return InputError(f"cannot reserve {size} bytes in {directory}: {error.strerror}")
    room = os.statvfs(directory)
    free = room.f_bavail * room.f_frsize
    return InputError(
        f"{directory} has {free} bytes free but the teacher's ring needs {size} bytes: enlarge it (in a container "
        "--shm-size), or lower workers.slots or train.micro_batch_tokens"
    )


def open_file(name: str, size: int, *, directory: Path = DIRECTORY) -> int:
    """Open another process's file for reading, if it is a regular file of ours, private and of this size.

    Raises:
        SignalError: Naming what is wrong with it.
    """
    if not re.fullmatch(re.escape(PREFIX) + r"[A-Za-z0-9_.-]+", name):
        raise SignalError(f"{name!r} is not the name of a ring in shared memory")
    with os_errors_as(SignalError, f"{directory / name} cannot be opened"):
        fd = open_below(directory, name)
    found = os.fstat(fd)
    complaint = access_of_others(found)
    if not complaint and found.st_size != size:
        complaint = f"has {found.st_size} bytes instead of {size}"
    if complaint:
        os.close(fd)
        raise SignalError(f"{directory / name} {complaint}")
    return fd


def remove_stale_files(directory: Path = DIRECTORY) -> list[Path]:
    """Remove this user's files whose owner is gone.

    Returns:
        The removed files.
    """
    removed = []
    found_here = {path for pattern in PATTERNS for path in directory.glob(pattern)} if directory.is_dir() else set()
    for path in sorted(found_here):
        try:
            fd = open_below(directory, path.name)
        except OSError:
            continue
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                continue
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except BlockingIOError:  # its owner lives
            continue
        finally:
            os.close(fd)
    return removed
