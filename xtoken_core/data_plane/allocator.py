"""The C library's allocator, told to keep the memory of frames for the next ones."""

from __future__ import annotations

import ctypes
import os

CLIENT_KEEPS = 64 << 20
"""Bytes that a client's process keeps free for the next frames, of each thread's arena at most."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
MAPPED_ALONE = 32 << 20
VARIABLES = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def set_allocator(*, keep: int, arenas: int = 0) -> bool:
    """Let up to `keep` bytes of freed memory stay with the process, where glibc is its C library.

    By default glibc hands the end of its heap back to the system once a little of it is free, so the memory of each
    large frame is taken from the system anew, page by page, which costs more than copying the frame does. The settings
    hold for the whole process; ones that the environment makes (`VARIABLES`) are left as they are.

    Args:
        keep: Bytes, of each arena; buffers of 32 MiB and more are mapped alone and always handed back.
        arenas: How many arenas the threads share that begin from now on; glibc's choice if 0.

    Returns:
        Whether the allocator has taken them.
    """
    if any(os.environ.get(variable) for variable in VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = {M_MMAP_THRESHOLD: MAPPED_ALONE, M_TRIM_THRESHOLD: keep, M_ARENA_MAX: arenas}
    return all(mallopt(name, value) for name, value in wanted.items() if value)
