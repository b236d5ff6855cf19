"""Tensors over foreign memory, such as a received frame, a column or a mapped file, and arrays over tensors."""

from __future__ import annotations

import mmap
import warnings

import numpy as np
import torch
from torch import Tensor

from xtoken_core.wire.columns import ITEM_SIZES, Column

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_SIZES}
"""Every supported dtype, by its name on the wire."""

with warnings.catch_warnings():
    # torch warns once per process that a tensor over read-only bytes is not protected; ours are only read
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def tensor_over(buffer: memoryview | mmap.mmap, dtype: torch.dtype, *, count: int = -1) -> Tensor:
    """Return a flat tensor over a buffer's bytes, without a copy; it keeps the buffer alive.

    Args:
        buffer: The bytes; if they are read-only, the tensor must not be written.
        dtype: Type of the items.
        count: Number of items; all if -1.
    """
    if count == 0 or not memoryview(buffer).nbytes:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=count)


def column_values(column: Column) -> Tensor:
    """Return `[rows or steps, *item_shape]` over a column's bytes; a copy only where they are not aligned."""
    steps = column.rows if column.offsets is None else column.offsets[column.rows]
    flat = tensor_over(column.values, DTYPES[column.dtype])
    if flat.data_ptr() % flat.element_size():
        flat = flat.clone()
    return flat.view(steps, *column.item_shape)


def array_of(tensor: Tensor) -> np.ndarray:
    """Return a tensor's memory as an array; half precision as the bits, which numpy may not know."""
    return tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.int16).numpy().view(np.uint16)
