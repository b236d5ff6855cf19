"""The Triton backend of `select_topk_columns`."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.ops.numerics import Op
from xtoken_core.ops.select_topk_columns.kernels import (
    DIGITS,
    chosen_columns_kernel,
    column_keys_kernel,
    column_maxima_kernel,
    count_chosen_kernel,
    count_digits_kernel,
)
from xtoken_core.ops.select_topk_columns.reference import select_topk_columns
from xtoken_core.ops.triton_support import accumulates_in_float32, launching_on, row_strides

COLUMN_BLOCK = 1024
ROW_BLOCK = 128
ROWS_AT_ONCE = 4
"""Columns and rows of which a program takes the maximum, and how many rows it loads at once."""
KEY_BLOCK = 1024
BYTES = 4
"""Digits of a key."""
LANES = 128
"""Blocks whose counts are added up at once."""


def column_maxima(logits: Float[Tensor, "B T V"]) -> Float[Tensor, "parts V"]:
    """Return the largest value of each column over parts of the rows, in float32; all of them are read once.

    Args:
        logits: float32, bfloat16 or float16; the last dimension contiguous, a cut view of a wider head included.
    """
    B, T, V = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    parts = triton.cdiv(B * T, ROW_BLOCK)
    partial = torch.empty((parts, V), dtype=torch.float32, device=logits.device)
    column_maxima_kernel[(parts, triton.cdiv(V, COLUMN_BLOCK))](
        logits, partial, B * T, T, V, *row_strides(logits), ROW_BLOCK, ROWS_AT_ONCE, COLUMN_BLOCK
    )
    return partial


def largest_by_border(partial: Float[Tensor, "parts V"], k: int) -> Int[Tensor, " K"]:
    """Compute the same as `largest_columns` of the maxima over all parts, without sorting them.

    Args:
        partial: float32; NaN counts as the largest, -0.0 equals 0.0.
        k: How many, fewer than there are and at least one.
    """
    parts, V = partial.shape
    device, blocks = partial.device, triton.cdiv(V, KEY_BLOCK)
    keys = torch.empty(V, dtype=torch.int32, device=device)
    counts = torch.zeros((BYTES, DIGITS.value), dtype=torch.int32, device=device)
    above, equal = (torch.empty(blocks, dtype=torch.int32, device=device) for _ in range(2))
    columns = torch.empty(k, dtype=torch.int64, device=device)
    # Five launches instead of a sort: each byte's counts are complete before the next byte is counted.
    column_keys_kernel[(blocks,)](partial, keys, counts, parts, V, KEY_BLOCK)
    for byte in range(1, BYTES):
        count_digits_kernel[(blocks,)](keys, counts, V, k, byte, KEY_BLOCK)
    count_chosen_kernel[(blocks,)](keys, counts, above, equal, V, k, KEY_BLOCK)
    chosen_columns_kernel[(blocks,)](keys, counts, above, equal, columns, V, k, LANES, KEY_BLOCK)
    return columns


class TritonSelectTopkColumnsOp(Op):
    """Triton backend: the same ids as the reference."""

    def forward(self, logits: Float[Tensor, "B T V"], k: int) -> Int[Tensor, " K"]:
        """Compute the same as the reference, which runs for float64 and for no or all columns."""
        V = logits.shape[-1]
        if not 0 < k < V or not logits.numel() or not accumulates_in_float32(logits):
            return select_topk_columns(logits, k)
        with launching_on(logits):
            return largest_by_border(column_maxima(logits.detach()), k)
