"""The Triton kernel of `gold` that picks a chunk's largest uncommon probabilities, so that fewer have to be sorted.

How many lie above an edge is known after one pass over the list. A sample gives the first edge, which hardly ever
misses, since some more may be picked than are wanted; then an interval of edges is narrowed until one does not.
"""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

LARGEST = tl.constexpr(0x7F800001)
"""The key of NaN, above that of infinity."""
ONE = tl.constexpr(0x3F800000)
"""The key of the probability 1."""
FIRST_STEP = tl.constexpr(1 << 20)
"""An eighth of an octave: how far from a missed edge the next one is looked for, twice as far each time."""
LINE = tl.constexpr(16)
"""Neighbouring entries that are sampled together, a transfer of memory."""


@triton.jit
def keys_of(values_ptr, at, u):
    """Return probabilities, and their bits, which as integers are in the same order; -1 beyond the list."""
    p = tl.load(values_ptr + at, mask=at < u, other=0.0)
    key = tl.minimum(p.to(tl.int32, bitcast=True) & 0x7FFFFFFF, LARGEST)
    return p, tl.where(at < u, key, -1)


@triton.jit
def guessed_edge(values_ptr, wanted, u, STEP: tl.constexpr, SAMPLE: tl.constexpr):
    """Guess a key above which `wanted` of a list lie, from every STEP-th line of it."""
    at = tl.arange(0, SAMPLE) // LINE * (LINE * STEP) + tl.arange(0, SAMPLE) % LINE
    _, key = keys_of(values_ptr, at, u)  # [SAMPLE], read once
    low, high = 0, ONE + 0
    for _ in range(20):  # to a thousandth of an octave
        middle = (low + high) // 2
        enough = tl.sum((key > middle).to(tl.int32), axis=0) * STEP >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low


@triton.jit
def take(values_ptr, ids_ptr, picked_ptr, picked_ids_ptr, u, room, edge, equal_room, BLOCK: tl.constexpr):
    """Store what is above an edge, and the first `equal_room` equal to it, in the order of the list, if there is room.

    Returns:
        How many these are, the smallest key above the edge and the largest that is not.
    """
    larger_before, equal_before = 0, 0
    least = tl.full((BLOCK,), LARGEST, dtype=tl.int32)
    most = tl.full((BLOCK,), -1, dtype=tl.int32)
    for start in range(0, u, BLOCK):
        # One entry a thread: places come from a scan, and pointers of another layout would go through shared memory.
        at = tl.max_contiguous(start + tl.arange(0, BLOCK), 1)
        p, key = keys_of(values_ptr, at, u)
        larger, equal = key > edge, key == edge
        # Both counts in one scan: 16 bits each, since BLOCK is less.
        counted = tl.cumsum(larger.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
        rank = equal_before + (counted >> 16)
        to = larger_before + (counted & 0xFFFF) + tl.minimum(rank, equal_room) - 1
        chosen = (larger | (equal & (rank <= equal_room))) & (to < room)
        tl.store(picked_ptr + to, p, mask=chosen)
        tl.store(picked_ids_ptr + to, tl.load(ids_ptr + at, mask=chosen, other=0), mask=chosen)
        least = tl.minimum(least, tl.where(larger, key, LARGEST))
        most = tl.maximum(most, tl.where(larger, -1, key))
        total = tl.max(counted, axis=0)
        larger_before += total & 0xFFFF
        equal_before += total >> 16
    taken = larger_before + tl.minimum(equal_before, equal_room)
    return taken, tl.min(least, axis=0), tl.max(most, axis=0)


@triton.jit(do_not_specialize=["from_chunk", "wanted", "room", "u"])
def gold_pick_kernel(
    values_ptr,
    ids_ptr,
    first_ptr,
    picked_ptr,
    picked_ids_ptr,
    from_chunk,
    wanted,
    room,
    u,
    STEP: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pick one chunk's `wanted` largest of `u` probabilities, with at most `room - wanted` more, in the order of ids.

    -1 fills the room that is left. A chunk without positions has probability 1 everywhere, and nothing is picked.
    """
    slot = tl.program_id(0).to(tl.int64)
    values_ptr += slot * u
    picked_ptr += slot * room
    picked_ids_ptr += slot * room
    chunk = from_chunk + slot
    taken, left = 0, 1.0
    if tl.load(first_ptr + chunk + 1) > tl.load(first_ptr + chunk):
        edge, equal_room = guessed_edge(values_ptr, (wanted + room) // 2, u, STEP, SAMPLE), 0
        # More than `room` keys are above `low`; fewer than `wanted`, `above`, are above `high`.
        low, high, above, step = -1, LARGEST + 0, 0, FIRST_STEP + 0
        taken = room + 1
        while (taken < wanted) | (taken > room):
            taken, least, most = take(values_ptr, ids_ptr, picked_ptr, picked_ids_ptr, u, room, edge, equal_room, BLOCK)
            # No key lies between the edge and these two, so they bound the interval instead of it.
            low = tl.where(taken > room, least - 1, low)
            high = tl.where(taken < wanted, most, high)
            above = tl.where(taken < wanted, taken, above)
            middle = low + (high - low) // 2
            nearer = tl.where(taken > room, tl.minimum(low + step, middle), tl.maximum(high - step, middle))
            tied = low + 1 >= high  # too many keys are equal to `high`: the first of them fill the room
            edge, equal_room = tl.where(tied, high, nearer), tl.where(tied, room - above, 0)
            step = tl.minimum(2 * step, 1 << 29)
        left = -1.0
    for start in range(taken, room, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(picked_ptr + at, tl.zeros((BLOCK,), dtype=tl.float32) + left, mask=at < room)
        tl.store(picked_ids_ptr + at, tl.zeros((BLOCK,), dtype=tl.int32), mask=at < room)
