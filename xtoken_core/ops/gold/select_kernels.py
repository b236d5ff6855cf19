"""The Triton kernels of `gold` that pick a chunk's most likely uncommon ids, before they are compared."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.gold.kernels import first_position, mean_log_probs

FIRST_EDGE = tl.constexpr(0x3E800000)
"""The key of log p = -0.25: at most one id of a chunk lies before it."""
FIRST_WIDTH = tl.constexpr(22)
"""Bits of half an octave of -log p: sixteen of them reach from the first edge to log p = -64."""
LINE = tl.constexpr(16)
"""Neighbouring ids that are looked at together when not all are."""


@triton.jit
def chunk_keys(
    logits_ptr,
    order_ptr,
    lse_ptr,
    listed_ptr,
    base,
    lse,
    first,
    count,
    start,
    u,
    T,
    stride_b,
    stride_t,
    scale,
    BLOCK: tl.constexpr,
):
    """Return a block of listed ids, a chunk's averaged log-probabilities at them, and keys: the bits of `-log p`.

    `base` and `lse` are those of its first position; beyond the list keys are -1.
    """
    # One id a thread: lists are stored by rank, and pointers of another layout would go through shared memory.
    at = tl.max_contiguous(start + tl.arange(0, BLOCK), 1)
    ids = tl.load(listed_ptr + at, mask=at < u, other=0)
    log_p = mean_log_probs(
        logits_ptr, order_ptr, lse_ptr, base, lse, first, count, ids, at < u, T, stride_b, stride_t, scale
    )
    key = tl.where(log_p >= 0.0, 0, tl.abs(log_p).to(tl.int32, bitcast=True))
    return ids, log_p, tl.where(at < u, key, -1)


@triton.jit
def count_digits(
    logits_ptr,
    order_ptr,
    lse_ptr,
    listed_ptr,
    base,
    lse,
    first,
    count,
    u,
    T,
    stride_b,
    stride_t,
    scale,
    least,
    edge,
    width,
    BLOCK: tl.constexpr,
):
    """Count the keys from `least` on per digit `(key - edge) >> width` in 0 .. 15, a byte per lane and digit.

    Keys before `edge` count for digit 0.
    """
    low = tl.zeros((BLOCK,), dtype=tl.int64)
    high = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, u, BLOCK):
        _, _, key = chunk_keys(
            logits_ptr,
            order_ptr,
            lse_ptr,
            listed_ptr,
            base,
            lse,
            first,
            count,
            start,
            u,
            T,
            stride_b,
            stride_t,
            scale,
            BLOCK,
        )
        digit = tl.maximum((key - edge) >> width, 0)
        one = tl.full((BLOCK,), 1, dtype=tl.int64) << ((digit & 7) * 8).to(tl.int64)
        low += tl.where((key >= least) & (digit < 8), one, 0)
        high += tl.where((key >= least) & (digit >= 8) & (digit < 16), one, 0)
    return low, high


@triton.jit
def next_digit(low, high, before, wanted):
    """Find the first digit up to which there are `wanted` keys, 16 = none, and count those before and up to it."""
    digit, kept, counted = 16, before, before
    for j in tl.static_range(16):
        lanes = low >> (j * 8) if j < 8 else high >> ((j - 8) * 8)
        further = counted + tl.sum((lanes & 255).to(tl.int32), axis=0)
        found = (digit == 16) & (further >= wanted)
        digit = tl.where(found, j, digit)
        kept = tl.where(digit == 16, further, kept)
        counted = tl.where((digit == 16) | found, further, counted)
    return digit, kept, counted


@triton.jit
def find_edge(
    logits_ptr,
    order_ptr,
    lse_ptr,
    listed_ptr,
    base,
    lse,
    first,
    count,
    u,
    T,
    stride_b,
    stride_t,
    scale,
    wanted,
    room,
    BLOCK: tl.constexpr,
):
    """Find the last key to take and the number of equal ones: at least `wanted` keys, if possible at most `room`.

    Each turn narrows an interval of keys to a sixteenth.
    """
    edge, width, before, counted, turn = FIRST_EDGE + 0, FIRST_WIDTH + 4, 0, room + 1, 0
    while (counted > room) & (width > 0):
        width = tl.maximum(width - 4, 0)
        least = tl.where(turn == 0, 0, edge)
        low, high = count_digits(
            logits_ptr,
            order_ptr,
            lse_ptr,
            listed_ptr,
            base,
            lse,
            first,
            count,
            u,
            T,
            stride_b,
            stride_t,
            scale,
            least,
            edge,
            width,
            BLOCK,
        )
        digit, before_digit, up_to_digit = next_digit(low, high, before, wanted)
        outside = (turn == 0) & ((digit == 0) | (digit == 16))
        edge = tl.where(outside, 0, edge + (digit << width))
        width = tl.where(outside, 31, width)
        before = tl.where(outside, 0, before_digit)
        counted = tl.where(outside, room + 1, up_to_digit)
        turn += 1
    return edge + ((1 << width) - 1), tl.where(counted > room, wanted - before, u)


@triton.jit(do_not_specialize=["T", "from_chunk", "wanted", "u"])
def gold_edge_kernel(
    logits_ptr,
    order_ptr,
    first_ptr,
    lse_ptr,
    listed_ptr,
    edge_ptr,
    from_chunk,
    wanted,
    u,
    T,
    stride_b,
    stride_t,
    scale,
    STEP: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """Guess a log-probability above which `wanted` of one chunk's listed ids lie, from one of STEP lines of them."""
    slot = tl.program_id(0).to(tl.int64)
    first = tl.load(first_ptr + from_chunk + slot)
    count = tl.load(first_ptr + from_chunk + slot + 1) - first
    if count > 0:
        base, lse = first_position(logits_ptr, order_ptr, lse_ptr, first, count, T, stride_b, stride_t)
        at = tl.arange(0, SAMPLE) // LINE * (LINE * STEP) + tl.arange(0, SAMPLE) % LINE
        ids = tl.load(listed_ptr + at, mask=at < u, other=0)
        log_p = mean_log_probs(
            logits_ptr, order_ptr, lse_ptr, base, lse, first, count, ids, at < u, T, stride_b, stride_t, scale
        )
        log_p = tl.where(at < u, log_p, float("-inf"))
        low, high = -128.0, 0.0
        for _ in range(17):  # to a thousandth of a nat
            middle = 0.5 * (low + high)
            enough = tl.sum((log_p > middle).to(tl.int32), axis=0) * STEP >= wanted
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        tl.store(edge_ptr + slot, low)


@triton.jit
def take_above(
    logits_ptr,
    order_ptr,
    lse_ptr,
    listed_ptr,
    base,
    lse,
    first,
    count,
    u,
    T,
    stride_b,
    stride_t,
    scale,
    values_ptr,
    ids_ptr,
    edge,
    room,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the probabilities above an edge, as far as there is room; return their number and the sum over all ids."""
    taken = 0
    mass = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, u, BLOCK):
        ids, log_p, key = chunk_keys(
            logits_ptr,
            order_ptr,
            lse_ptr,
            listed_ptr,
            base,
            lse,
            first,
            count,
            start,
            u,
            T,
            stride_b,
            stride_t,
            scale,
            BLOCK,
        )
        p = tl.exp(log_p)
        if MASS:
            mass += tl.where(key >= 0, p, 0.0)
        chosen = (key >= 0) & (log_p > edge)
        counted = tl.cumsum(chosen.to(tl.int32), axis=0)
        to = taken + counted - 1
        chosen = chosen & (to < room)
        tl.store(values_ptr + to, p, mask=chosen)
        tl.store(ids_ptr + to, ids, mask=chosen)
        taken += tl.max(counted, axis=0)
    return taken, tl.sum(mass, axis=0)


@triton.jit
def fill_up(values_ptr, ids_ptr, taken, room, value, BLOCK: tl.constexpr):
    """Fill up a list."""
    for start in range(0, room - taken, BLOCK):
        at = taken + start + tl.arange(0, BLOCK)
        tl.store(values_ptr + at, tl.zeros((BLOCK,), dtype=tl.float32) + value, mask=at < room)
        tl.store(ids_ptr + at, tl.zeros((BLOCK,), dtype=tl.int32), mask=at < room)


@triton.jit(do_not_specialize=["T", "from_chunk", "wanted", "room", "u"])
def gold_pick_kernel(
    logits_ptr,
    order_ptr,
    first_ptr,
    lse_ptr,
    listed_ptr,
    edge_ptr,
    values_ptr,
    ids_ptr,
    size_ptr,
    mass_ptr,
    from_chunk,
    wanted,
    room,
    u,
    T,
    stride_b,
    stride_t,
    scale,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pick one chunk's `wanted` largest of `u` uncommon probabilities, with at most `room - wanted` more, by id.

    They lie above a guessed edge; if they are too few or too many, the stored size is 0. Room that is left is filled
    with -1. A chunk without positions has probability 1 everywhere, and its size is `-wanted`.
    """
    slot = tl.program_id(0).to(tl.int64)
    chunk = from_chunk + slot
    values_ptr += slot * room
    ids_ptr += slot * room
    first = tl.load(first_ptr + chunk)
    count = tl.load(first_ptr + chunk + 1) - first
    taken, mass, size, left = 0, u.to(tl.float32), -wanted, 1.0
    if count > 0:
        base, lse = first_position(logits_ptr, order_ptr, lse_ptr, first, count, T, stride_b, stride_t)
        taken, mass = take_above(
            logits_ptr,
            order_ptr,
            lse_ptr,
            listed_ptr,
            base,
            lse,
            first,
            count,
            u,
            T,
            stride_b,
            stride_t,
            scale,
            values_ptr,
            ids_ptr,
            tl.load(edge_ptr + slot),
            room,
            MASS,
            BLOCK,
        )
        left = -1.0
        size = tl.where((taken >= wanted) & (taken <= room), taken, 0)
    tl.store(size_ptr + slot, size)
    if MASS:
        tl.store(mass_ptr + chunk, tl.load(mass_ptr + chunk) + mass)
    fill_up(values_ptr, ids_ptr, taken, room, left, BLOCK)


@triton.jit
def take(
    logits_ptr,
    order_ptr,
    lse_ptr,
    listed_ptr,
    base,
    lse,
    first,
    count,
    u,
    T,
    stride_b,
    stride_t,
    scale,
    values_ptr,
    ids_ptr,
    last,
    last_room,
    BLOCK: tl.constexpr,
):
    """Store the keys before `last` and `last_room` equal to it; return their number."""
    taken, at_last = 0, 0
    for start in range(0, u, BLOCK):
        ids, log_p, key = chunk_keys(
            logits_ptr,
            order_ptr,
            lse_ptr,
            listed_ptr,
            base,
            lse,
            first,
            count,
            start,
            u,
            T,
            stride_b,
            stride_t,
            scale,
            BLOCK,
        )
        before, equal = (key >= 0) & (key < last), (key >= 0) & (key == last)
        counted = tl.cumsum(before.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
        rank = at_last + (counted >> 16)
        to = taken + (counted & 0xFFFF) + tl.minimum(rank, last_room) - 1
        chosen = before | (equal & (rank <= last_room))
        tl.store(values_ptr + to, tl.exp(log_p), mask=chosen)
        tl.store(ids_ptr + to, ids, mask=chosen)
        total = tl.max(counted, axis=0)
        taken += total & 0xFFFF
        at_last += total >> 16
    return taken + tl.minimum(at_last, last_room)


@triton.jit(do_not_specialize=["T", "from_chunk", "wanted", "room", "u"])
def gold_select_kernel(
    logits_ptr,
    order_ptr,
    first_ptr,
    lse_ptr,
    listed_ptr,
    values_ptr,
    ids_ptr,
    size_ptr,
    from_chunk,
    wanted,
    room,
    u,
    T,
    stride_b,
    stride_t,
    scale,
    COUNT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Select as `gold_pick_kernel` does, for chunks that have no size yet.

    The edge is found among all ids. Of too many equal ones at the edge the first are taken.
    """
    slot = tl.program_id(0).to(tl.int64)
    if tl.load(size_ptr + slot) == 0:
        chunk = from_chunk + slot
        first = tl.load(first_ptr + chunk)
        count = tl.load(first_ptr + chunk + 1) - first
        base, lse = first_position(logits_ptr, order_ptr, lse_ptr, first, count, T, stride_b, stride_t)
        last, last_room = find_edge(
            logits_ptr,
            order_ptr,
            lse_ptr,
            listed_ptr,
            base,
            lse,
            first,
            count,
            u,
            T,
            stride_b,
            stride_t,
            scale,
            wanted,
            room,
            COUNT_BLOCK,
        )
        taken = take(
            logits_ptr,
            order_ptr,
            lse_ptr,
            listed_ptr,
            base,
            lse,
            first,
            count,
            u,
            T,
            stride_b,
            stride_t,
            scale,
            values_ptr + slot * room,
            ids_ptr + slot * room,
            last,
            last_room,
            BLOCK,
        )
        tl.store(size_ptr + slot, taken)
        fill_up(values_ptr + slot * room, ids_ptr + slot * room, taken, room, -1.0, BLOCK)
