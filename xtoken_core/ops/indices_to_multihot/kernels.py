"""The Triton kernels of `indices_to_multihot`."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def _indices_to_multihot_kernel(
    indices_ptr,
    probs_in_indices_ptr,
    multihot_indices_ptr,
    probs_in_multihot_ptr,
    num_of_tokens,
    num_of_local_experts: tl.constexpr,
    num_of_local_experts_next_power_of_2: tl.constexpr,
    topk: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Spread `[tokens, topk]` over `[tokens, experts]`, BLOCK_SIZE tokens per program; higher slots overwrite lower."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    experts = tl.arange(0, num_of_local_experts_next_power_of_2)
    row_mask = rows < num_of_tokens
    chosen = tl.zeros((BLOCK_SIZE, num_of_local_experts_next_power_of_2), dtype=tl.int1)
    probs = tl.zeros((BLOCK_SIZE, num_of_local_experts_next_power_of_2), dtype=probs_in_multihot_ptr.dtype.element_ty)
    for slot in tl.static_range(topk):
        index = tl.load(indices_ptr + rows * topk + slot, mask=row_mask, other=-1)
        prob = tl.load(probs_in_indices_ptr + rows * topk + slot, mask=row_mask, other=0.0)
        index = tl.where((index >= 0) & (index < num_of_local_experts), index, -1).to(tl.int32)
        hit = index[:, None] == experts[None, :]
        chosen = chosen | hit
        probs = tl.where(hit, prob[:, None], probs)
    places = rows[:, None] * num_of_local_experts + experts[None, :]
    mask = row_mask[:, None] & (experts < num_of_local_experts)[None, :]
    tl.store(multihot_indices_ptr + places, chosen, mask=mask)
    tl.store(probs_in_multihot_ptr + places, probs, mask=mask)


@triton.jit
def _multihot_to_indices_kernel(
    probs_in_multihot_ptr,
    indices_ptr,
    probs_indices_ptr,
    num_of_tokens,
    num_of_local_experts: tl.constexpr,
    topk: tl.constexpr,
    topk_next_power_of_2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Gather `[tokens, experts]` back to the slots of `[tokens, topk]`; slots that lost or name no expert get 0."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    slots = tl.arange(0, topk_next_power_of_2)
    mask = (rows < num_of_tokens)[:, None] & (slots < topk)[None, :]
    places = rows[:, None] * topk + slots[None, :]
    index = tl.load(indices_ptr + places, mask=mask, other=-1)
    wins = (index >= 0) & (index < num_of_local_experts)
    index = tl.where(wins, index, -1).to(tl.int32)
    for later in tl.static_range(1, topk):
        other = tl.max(tl.where(slots[None, :] == later, index, -1), axis=1)
        wins = wins & ((slots[None, :] >= later) | (index != other[:, None]))
    values = tl.load(probs_in_multihot_ptr + rows[:, None] * num_of_local_experts + index, mask=wins, other=0.0)
    tl.store(probs_indices_ptr + places, values, mask=mask)
