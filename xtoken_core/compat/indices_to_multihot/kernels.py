"""The Triton kernels of `indices_to_multihot`."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def winning_slots(indices_ptr, places, index, slots, inside, num_of_local_experts, topk: tl.constexpr):
    """Return True at the slots `[tokens, slots]` that name an expert which no higher slot of the row names again."""
    wins = (index >= 0) & (index < num_of_local_experts)
    for later in tl.static_range(1, topk):
        # [tokens, slots]
        other = tl.load(indices_ptr + places + later, mask=inside & (slots < topk - later)[None, :], other=-1)
        wins = wins & (other != index)
    return wins


@triton.jit
def _indices_to_multihot_kernel(
    indices_ptr,
    probs_in_indices_ptr,
    multihot_indices_ptr,
    probs_in_multihot_ptr,
    num_of_tokens,
    num_of_local_experts: tl.constexpr,
    topk: tl.constexpr,
    topk_next_power_of_2: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Spread `[tokens, topk]` over `[tokens, experts]`, BLOCK_SIZE tokens per program.

    The probabilities' rows are written as zeros, and once every thread has done so the winning slots into them. The
    chosen experts are collected as bits, WORDS 32-bit words a row, and written as whole rows.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    for start in tl.static_range(0, BLOCK_SIZE * num_of_local_experts, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        zeros = tl.zeros((ENTRIES,), dtype=probs_in_multihot_ptr.dtype.element_ty)
        # A whole tile is stored without a mask, as wide vectors.
        left = tl.minimum(num_of_tokens - first, BLOCK_SIZE) * num_of_local_experts
        place = probs_in_multihot_ptr + first * num_of_local_experts + entry
        if start + ENTRIES <= left:
            tl.store(place, zeros)
        else:
            tl.store(place, zeros, mask=entry < left)
    rows, slots = first + tl.arange(0, BLOCK_SIZE), tl.arange(0, topk_next_power_of_2)
    inside = (rows < num_of_tokens)[:, None] & (slots < topk)[None, :]
    places = rows[:, None] * topk + slots[None, :]
    index = tl.load(indices_ptr + places, mask=inside, other=-1)
    prob = tl.load(probs_in_indices_ptr + places, mask=inside, other=0.0)
    wins = winning_slots(indices_ptr, places, index, slots, inside, num_of_local_experts, topk)
    expert = tl.where(wins, index, 0).to(tl.int32)
    word, bit = tl.arange(0, WORDS), tl.arange(0, 32)
    own = wins[:, :, None] & ((expert >> 5)[:, :, None] == word[None, None, :])
    # [tokens, slots, WORDS] added over slots: winning slots of a row name different experts, so bits never carry.
    words = tl.sum(tl.where(own, (1 << (expert & 31))[:, :, None], 0), axis=1)
    chosen = ((words[:, :, None] >> bit[None, None, :]) & 1).to(tl.int1)
    column = word[:, None] * 32 + bit[None, :]
    there = (rows < num_of_tokens)[:, None, None] & (column < num_of_local_experts)[None, :, :]
    tl.store(multihot_indices_ptr + rows[:, None, None] * num_of_local_experts + column[None, :, :], chosen, mask=there)
    tl.debug_barrier()  # zeros before values
    tl.store(probs_in_multihot_ptr + rows[:, None] * num_of_local_experts + expert, prob, mask=wins)


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
    """Gather `[tokens, experts]` back to the slots of `[tokens, topk]`; other slots (duplicates, no expert) get 0."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    slots = tl.arange(0, topk_next_power_of_2)
    mask = (rows < num_of_tokens)[:, None] & (slots < topk)[None, :]
    places = rows[:, None] * topk + slots[None, :]
    index = tl.load(indices_ptr + places, mask=mask, other=-1)
    wins = winning_slots(indices_ptr, places, index, slots, mask, num_of_local_experts, topk)
    expert = tl.where(wins, index, 0)
    values = tl.load(probs_in_multihot_ptr + rows[:, None] * num_of_local_experts + expert, mask=wins, other=0.0)
    tl.store(probs_indices_ptr + places, values, mask=mask)
