"""The Triton backend of `select_topk_columns`."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
from jaxtyping import Float, Int
from torch import Tensor, nn

from xtoken_core.ops.select_topk_columns.kernels import (
    above_border_kernel,
    chosen_columns_kernel,
    column_maxima_kernel,
)
from xtoken_core.ops.select_topk_columns.reference import select_topk_columns
from xtoken_core.ops.triton_support import accumulates_in_float32, launching_on

COLUMN_BLOCK = 1024
ROW_BLOCK = 128
ROWS_AT_ONCE = 4
"""Columns and rows of which a program takes the maximum, and how many rows it loads at once."""
KEY_BLOCK = 1024


def column_maxima(logits: Float[Tensor, "B T V"]) -> Float[Tensor, " V"]:
    """Return the largest value of each column over all rows, in float32, read once.

    Args:
        logits: float32, bfloat16 or float16; the last dimension contiguous, a cut view of a wider head included.
    """
    B, T, V = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    blocks = triton.cdiv(B * T, ROW_BLOCK)
    partial = torch.empty((blocks, V), dtype=torch.float32, device=logits.device)
    with launching_on(logits):
        column_maxima_kernel[(blocks, triton.cdiv(V, COLUMN_BLOCK))](
            logits, partial, B * T, T, V, logits.stride(0), logits.stride(1), ROW_BLOCK, ROWS_AT_ONCE, COLUMN_BLOCK
        )
    return partial.amax(dim=0)


def largest_by_border(maxima: Float[Tensor, " V"], k: int) -> Int[Tensor, " K"]:
    """Compute the same as `largest_columns`: a top-k of values gives the border, a running count the ids.

    Args:
        maxima: float32; NaN counts as the largest, -0.0 equals 0.0.
        k: How many, fewer than there are.
    """
    V = maxima.shape[0]
    clean = torch.where(maxima.isnan(), torch.nan, maxima + 0.0)
    bits = clean.view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the floats
    border = keys.topk(k, sorted=False).values.amin()
    counted = torch.empty(V, dtype=torch.int64, device=maxima.device)
    columns = torch.empty(k, dtype=torch.int64, device=maxima.device)
    grid = (triton.cdiv(V, KEY_BLOCK),)
    with launching_on(maxima):
        above_border_kernel[grid](keys, border, counted, V, KEY_BLOCK)
        chosen_columns_kernel[grid](keys, border, counted.cumsum(0), columns, V, k, KEY_BLOCK)
    return columns


class TritonSelectTopkColumnsOp(nn.Module):
    """Triton backend: the same ids as the reference."""

    def forward(self, logits: Float[Tensor, "B T V"], k: int) -> Int[Tensor, " K"]:
        """Compute the same as the reference, which runs for float64."""
        V = logits.shape[-1]
        if k >= V or not logits.numel() or not accumulates_in_float32(logits):
            return select_topk_columns(logits, k)
        return largest_by_border(column_maxima(logits.detach()), k)

    def forward_fp32(self, logits: Float[Tensor, "B T V"], k: int) -> Int[Tensor, " K"]:
        """Compute the same as `forward`: upcasting keeps every order."""
        return self.forward(logits, k)
