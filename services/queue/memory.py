"""The process's memory: what the queue lets go of goes back to the system, and no pause grows with what it holds."""

from __future__ import annotations

import ctypes
import gc

from xtoken_core.data_plane.allocator import keep_freed_memory

KEEPS = 32 << 20
YOUNG, MIDDLE, OLD = 50_000, 20, 50
WORTH_BYTES = 32 << 20
SHARE = 4


def settle() -> None:
    """Leave what is there now out of garbage collections, and make those rare: the engine makes no cycles.

    What batches leave free is kept for the next ones, up to a bound; `Returned` hands it back when most are gone.
    """
    keep_freed_memory(KEEPS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)


class Returned:
    """Hands free memory back to the system once most of what was held is gone."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._peak = 0

    def look(self, nbytes: int) -> None:
        """Called now and then with the bytes held."""
        self._peak = max(self._peak, nbytes)
        if self._peak >= WORTH_BYTES and nbytes * SHARE <= self._peak:
            self._peak = nbytes
            gc.collect()
            if self._trim is not None:
                self._trim(0)
