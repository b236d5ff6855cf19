"""The C library's allocator, told to keep the memory of frames for the next ones."""

from __future__ import annotations

import ctypes
import os

CLIENT_KEEPS = 64 << 20
"""Bytes that a client's process keeps free for the next frames, of each thread's arena at most."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAPPED_ALONE = 32 << 20
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(nbytes: int) -> bool:
    """Let up to `nbytes` of freed memory stay with the process, where glibc is its C library.

    By default glibc hands the end of its heap back to the system once a little of it is free, so the memory of each
    large frame is taken from the system anew, page by page, which costs more than copying the frame does. The setting
    holds for the whole process; one that the environment makes (`VARIABLES`) is left as it is.

    Args:
        nbytes: Of each arena; buffers of 32 MiB and more are mapped alone and always handed back.

    Returns:
        Whether the allocator has taken it.
    """
    if any(os.environ.get(variable) for variable in VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAPPED_ALONE)) and bool(mallopt(M_TRIM_THRESHOLD, nbytes))
