"""Forks of this process, in which everything large is imported already."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def run_in_fork(action: Callable[[], int], folder: Path, seconds: float) -> bool:
    """Run an action in a silent fork, with a folder for temporary files, and end all that it has left behind.

    Returns whether the action has returned 0 in time.
    """
    child = os.fork()
    if not child:
        status = 1
        try:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no fork outlives this process
            os.setsid()
            silent = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(silent, descriptor)
            os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["TMPDIR"] = str(folder)
            status = action()
        finally:
            os._exit(status)
    deadline, done = time.monotonic() + seconds, 0
    while not done and time.monotonic() < deadline:
        time.sleep(0.02)
        done, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    if not done:
        os.waitpid(child, 0)
    return bool(done) and status == 0
