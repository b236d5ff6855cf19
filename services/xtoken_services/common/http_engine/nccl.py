"""NCCL's calls, of the library that torch has loaded.

`torch.cuda.nccl.init_rank` of torch 2.11 raises "PY_SSIZE_T_CLEAN macro must be defined" whatever it is given.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

LIBRARY = "libnccl.so.2"
TYPES = {torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}
"""NCCL's number of a dtype."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


def unique_id() -> bytes:
    """Return the id of a new communicator, 128 bytes, which its ranks find each other by."""
    made = _UniqueId()
    _call("ncclGetUniqueId", ctypes.byref(made))
    return bytes(made)


class Communicator:
    """A group of GPUs, of which rank 0 sends to the others; made when all have joined.

    Args:
        size: Its number of ranks.
        name: What `unique_id` has returned to one of them.
        rank: Of the current GPU.
    """

    def __init__(self, size: int, name: bytes, rank: int) -> None:
        self._handle = ctypes.c_void_p()
        _call("ncclCommInitRank", ctypes.byref(self._handle), size, _UniqueId.from_buffer_copy(name), rank)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by the sum (NCCL's operator 0) over the ranks, on the current stream."""
        self._on_stream("ncclAllReduce", tensor, 0)

    def broadcast(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by rank 0's, on the current stream."""
        self._on_stream("ncclBroadcast", tensor, 0)

    def _on_stream(self, name: str, tensor: Tensor, how: int) -> None:
        """Call a function by the operator or root `how`."""
        at, count = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _call(name, at, at, count, TYPES[tensor.dtype], how, self._handle, stream)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the library; end the process in one line if it fails."""
    library = ctypes.CDLL(LIBRARY)
    if code := getattr(library, name)(*arguments):
        library.ncclGetErrorString.restype = ctypes.c_char_p
        raise SystemExit(f"{name}: {library.ncclGetErrorString(code).decode()}")
