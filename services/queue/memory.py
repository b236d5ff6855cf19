"""The process's memory: used again while there is work, handed back to the system after, and no pause grows with it.

A page that is fresh from the system costs as much as the copy of its bytes, or more. So what batches leave free stays
with the process for some seconds, in which the next ones may come.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections import deque
from pathlib import Path

from xtoken_core.data_plane.allocator import set_allocator

YOUNG, MIDDLE, OLD = 50_000, 20, 50
KEEPS = (1 << 31) - 1
WORTH_BYTES = 1 << 20
SHARE = 1.25
LOOKS, MANY_LOOKS = 10, 240
PAGE = os.sysconf("SC_PAGE_SIZE")
STATM = Path("/proc/self/statm")


def one_heap() -> None:
    """One heap for all threads, of which only `Returned` hands anything back; to be called before there are threads."""
    set_allocator(keep=KEEPS, arenas=1)


def settle() -> None:
    """Leave what is there now out of garbage collections, and make those rare: the engine makes no cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)


class Returned:
    """Hands free memory back to the system once it has not been needed for some looks.

    Args:
        held: Bytes of samples that are there already.
    """

    def __init__(self, held: int = 0) -> None:
        self._at_first = resident_bytes() - held
        self._lately: deque[int] = deque([held], maxlen=LOOKS)
        self._pause = LOOKS

    def look(self, nbytes: int) -> None:
        """Called at regular times with the bytes held."""
        self._lately.append(nbytes)
        self._pause -= 1
        before = resident_bytes()
        if self._pause <= 0 and before - self._at_first - SHARE * max(self._lately) > WORTH_BYTES:
            gc.collect()
            trim()
            self._pause = LOOKS if before - resident_bytes() > WORTH_BYTES else MANY_LOOKS


def trim() -> None:
    """Hand every free page back to the system, where glibc is the C library."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not tell."""
    try:
        return int(STATM.read_text().split()[1]) * PAGE
    except OSError:
        return 0
