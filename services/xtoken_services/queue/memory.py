"""Memory of the process: kept for the next batches while there is load, returned to the system after it.

A fresh page from the system costs as much as copying its bytes, or more, so freed memory stays with the process for
some seconds. Garbage collection is tuned so that no pause grows with the number of samples.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections import deque
from pathlib import Path

from xtoken_core.data_plane.allocator import set_allocator

YOUNG, MIDDLE, OLD = 50_000, 20, 50
KEEP_BYTES = (1 << 31) - 1
MIN_TRIM_BYTES = 1 << 20
HELD_FACTOR = 1.25
CHECKS, MANY_CHECKS = 10, 240
PAGE = os.sysconf("SC_PAGE_SIZE")
STATM = Path("/proc/self/statm")


class _Process:
    """File and function of the memory checks, opened once: they must work when there are no descriptors left."""

    def __init__(self) -> None:
        self.malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self.pid, self.statm = -1, -1

    def read_statm(self) -> bytes:
        if self.pid != os.getpid():  # a child's own file
            self.pid, self.statm = os.getpid(), os.open(STATM, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self.statm, 128, 0)


_process = _Process()


def one_heap() -> None:
    """Use one heap for all threads, which only `MemoryTrimmer` trims; to be called before threads are started."""
    set_allocator(keep=KEEP_BYTES, arenas=1)


def freeze_gc() -> None:
    """Exclude present objects from garbage collection and make it rare: the engine creates no reference cycles."""
    gc.collect()
    # Objects of imports and of a replayed journal live as long as the process: no collection visits them again.
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)


class MemoryTrimmer:
    """Returns free memory to the system once it has not been needed for some checks.

    Args:
        held: Bytes of samples that are held already.
    """

    def __init__(self, held: int = 0) -> None:
        self._baseline = resident_bytes() - held
        self._lately: deque[int] = deque([held], maxlen=CHECKS)
        self._pause = CHECKS

    def check(self, nbytes: int) -> None:
        """Trim if it is worth it; to be called regularly with the bytes held."""
        self._lately.append(nbytes)
        self._pause -= 1
        before = resident_bytes()
        # The maximum of the last checks: memory that batches use in turns is needed again at once.
        if self._pause <= 0 and before - self._baseline - HELD_FACTOR * max(self._lately) > MIN_TRIM_BYTES:
            gc.collect()
            trim()
            self._pause = CHECKS if before - resident_bytes() > MIN_TRIM_BYTES else MANY_CHECKS


def trim() -> None:
    """Return every free page to the system, where glibc is the C library."""
    if _process.malloc_trim is not None:
        _process.malloc_trim(0)


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 where the system does not report it."""
    try:
        return int(_process.read_statm().split()[1]) * PAGE
    except OSError:
        return 0
