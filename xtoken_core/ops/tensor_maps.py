"""Reading by TMA: descriptors of logits that are made on the host, where GPU, Triton and layout allow it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from xtoken_core.ops.triton_support import row_strides

try:
    from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]
except ImportError:  # an older Triton
    TensorDescriptor = None

WIDTH = 64
"""Columns of a matrix, 128 bytes of two-byte logits: what one transfer takes as a whole."""


@cache
def reads_by_tma(device: torch.device) -> bool:
    """Return True for an NVIDIA GPU from Hopper on, with a Triton that knows descriptors."""
    if TensorDescriptor is None or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def row_matrix(logits: Tensor, block: int) -> Any | None:
    """Return a descriptor of all logits as a matrix of WIDTH columns, in tiles of `block` logits, if there is one.

    A row of logits begins at a row of the matrix. Whether it does depends on widths and strides, which are the
    model's, not on the numbers of samples and positions. A tile that ends behind its row holds other logits there.

    Args:
        logits: `[B, T, V]`, not empty, with a contiguous last dimension.
        block: A power of two.
    """
    B, T, V = logits.shape
    strides = row_strides(logits)
    # Up to the last logit that a row has: what lies behind belongs to another tensor.
    rows = ((B - 1) * strides[0] + (T - 1) * strides[1] + V) // WIDTH
    aligned = not any(n % WIDTH for n in (*strides, block, V)) and rows <= torch.iinfo(torch.int32).max
    if not aligned or not _readable(logits):
        return None
    return TensorDescriptor(logits, [rows, WIDTH], [WIDTH, 1], [block // WIDTH, WIDTH])


def _readable(logits: Tensor) -> bool:
    aligned = logits.element_size() == 2 and logits.data_ptr() % 16 == 0
    return aligned and reads_by_tma(logits.device)
