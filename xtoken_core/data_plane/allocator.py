"""Settings of the C library's allocator, so that freed memory is reused for the next frames."""

from __future__ import annotations

import ctypes
import os

CLIENT_KEEPS = 64 << 20
"""Bytes that a client's process keeps free per arena."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
MAPPED_ALONE = 32 << 20
VARIABLES = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def set_allocator(*, keep: int, arenas: int = 0) -> bool:
    """Keep up to `keep` bytes of freed memory in the process, where glibc is its C library.

    By default glibc returns the end of its heap to the system as soon as a little of it is free, so each large frame
    faults in fresh pages, which costs more than copying the frame. The settings hold for the whole process; those that
    the environment makes (`VARIABLES`) are left unchanged.

    Args:
        keep: Bytes per arena; buffers of 32 MiB and more are mapped alone and always returned.
        arenas: Number of arenas that new threads share; glibc's choice if 0.

    Returns:
        True if the allocator has accepted them.
    """
    if any(os.environ.get(variable) for variable in VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = {M_MMAP_THRESHOLD: MAPPED_ALONE, M_TRIM_THRESHOLD: keep, M_ARENA_MAX: arenas}
    return all(mallopt(name, value) for name, value in wanted.items() if value)
