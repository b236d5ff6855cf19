"""The Triton backend of `largest_logits`."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.ops.largest_logits.kernels import (
    choose_groups_kernel,
    group_statistics_kernel,
    order_tokens_kernel,
    select_tokens_kernel,
)
from xtoken_core.ops.largest_logits.reference import GROUP, LargestLogits, largest_logits
from xtoken_core.ops.numerics import Op
from xtoken_core.ops.triton_support import accumulates_in_float32, launching_on, power_of_2, row_strides

TILE_GROUPS, TILE_WARPS = 64, 4
"""Groups of one program of the pass over whole rows."""
LANES_PER_WARP = 256
"""Groups of a row, all in one program."""
MOST_REGISTERS = 64
"""Of a thread there, so that two programs of 16 warps share a multiprocessor."""
SLOTS_PER_WARP, MOST_WARPS, FEWEST_SLOTS = 16, 16, 16
"""Chosen groups of a row, all in one program."""
SLOTS_AT_ONCE = 4
"""Of those per warp, what is ranked at once."""
MOST_TOKENS, MOST_GROUPS = 512, 16_384
"""What one program can hold: chosen groups, and groups of a row."""
UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Last bits that are the same in every number of a dtype once it is float32."""
ALIGNED = 16
"""Triton reads whole vectors of a row of which a multiple of this may be read."""


def _largest(logits: Tensor, targets: Tensor, k: int, V: int, temperature: float) -> LargestLogits:
    """Compute the same as the reference, in four launches; the rows are read once, the chosen groups twice."""
    B, T, V_m = logits.shape
    logits, targets = logits if logits.stride(-1) == 1 else logits.contiguous(), targets.contiguous()
    scaled, scale, strides = temperature != 1.0, 1.0 / temperature, row_strides(logits)
    # Rows are read up to a multiple of ALIGNED where the head is as wide: whole vectors, the rest masked.
    width = min(V_m, triton.cdiv(V, ALIGNED) * ALIGNED)
    tiles, wanted = triton.cdiv(V, GROUP * TILE_GROUPS), min(k, triton.cdiv(V, GROUP))
    K, lanes = max(power_of_2(k), FEWEST_SLOTS), power_of_2(triton.cdiv(V, GROUP))
    groups, shift, device = tiles * TILE_GROUPS, UNUSED_BITS[logits.dtype], logits.device
    # [2 or 3, B * T, groups]: maxima, sums at temperature 1, and at the temperature if it is another.
    maxima, *sums = torch.empty((3 if scaled else 2, B * T, groups), dtype=torch.float32, device=device)
    # Not parts of one tensor: how they are aligned would depend on the batch, and kernels be compiled for either.
    log_z, log_rest, own, top, total = (torch.empty((B, T), dtype=torch.float32, device=device) for _ in range(5))
    log_z_scaled = torch.empty_like(log_z) if scaled else log_z
    chosen = torch.empty((B * T, K), dtype=torch.int32, device=device)
    edge = torch.empty(B * T, dtype=torch.int32, device=device)
    picked = torch.empty((B * T, K), dtype=torch.int64, device=device)
    ids = torch.empty((B, T, k), dtype=torch.int64, device=device)
    values = torch.empty((B, T, k), dtype=torch.float32, device=device)
    sizes = T, V, width, groups, tiles, *strides, scale
    group_statistics_kernel[(B * T * tiles,)](
        logits, maxima, sums[0], sums[-1], *sizes, width > V, scaled, TILE_GROUPS, num_warps=TILE_WARPS
    )
    tensors = logits, targets, maxima, sums[0], sums[-1], chosen, edge, log_z, log_z_scaled, own, top, total
    constants = T, V, k, wanted, groups, *strides, scale, scaled, K, shift, lanes
    warps = min(max(lanes // LANES_PER_WARP, 1), MOST_WARPS)
    choose_groups_kernel[(B * T,)](*tensors, *constants, num_warps=warps, maxnreg=MOST_REGISTERS)
    # A program holds all tokens of the chosen groups: warps grow with k, so that a thread's part stays the same.
    warps = min(K // SLOTS_PER_WARP, MOST_WARPS)
    inputs, sizes_of_rows = (logits, chosen, edge, picked, top, total), (T, V, width, k, wanted, *strides, scale)
    select_tokens_kernel[(B * T,)](*inputs, *sizes_of_rows, K, shift, SLOTS_AT_ONCE * warps, num_warps=warps)
    order_tokens_kernel[(B * T,)](
        picked, log_z_scaled, top, total, ids, values, log_rest, k, scale, K, num_warps=min(max(K // 64, 1), 4)
    )
    return LargestLogits(ids, values, log_z, log_z_scaled, log_rest, own)


class TritonLargestLogitsOp(Op):
    """Triton backend: the same tokens as the reference, sums up to rounding; deterministic, no wait for the device."""

    def forward(
        self,
        logits: Float[Tensor, "B T V_m"],
        targets: Int[Tensor, "B T"],
        k: int,
        vocab_size: int,
        temperature: float = 1.0,
    ) -> LargestLogits:
        """Compute the same as the reference, which runs for float64, no positions, and more than a program holds."""
        few = 0 < k <= MOST_TOKENS and vocab_size <= MOST_GROUPS * GROUP
        if not few or not logits.numel() or not accumulates_in_float32(logits):
            return largest_logits(logits, targets, k, vocab_size, temperature)
        with launching_on(logits):
            return _largest(logits.detach(), targets, min(k, vocab_size), vocab_size, temperature)
