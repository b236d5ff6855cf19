"""The Triton kernel of `gold` that picks a chunk's most likely uncommon ids, before they are sorted."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.gold.kernels import EPS

FIRST_EDGE = tl.constexpr(0x3E800000)
"""The key of log p = -0.25: at most one id of a chunk lies before it."""
FIRST_WIDTH = tl.constexpr(22)
"""Bits of half an octave of -log p: sixteen of them reach from the first edge to log p = -64."""
GUESS_WIDTH = tl.constexpr(10)
"""Bits of the interval within which an edge is guessed."""
LINE = tl.constexpr(64)
"""Neighbouring ids that are looked at together when not all are."""


@triton.jit
def chunk_keys(
    logits_ptr, order_ptr, lse_ptr, uncommon_ptr, base, lse, first, count, ids, V, T, stride_b, stride_t, scale
):
    """Return a chunk's averaged log-probabilities at `ids`, and their keys: the bits of `-log p`; -1 for common ids.

    `base` and `lse` are those of its first position.
    """
    inside = ids < V
    log_p = tl.load(base + ids, mask=inside, other=0.0).to(tl.float32) * scale - lse
    if count > 1:
        for i in range(1, count):
            row = tl.load(order_ptr + first + i)
            place = logits_ptr + row // T * stride_b + row % T * stride_t
            log_p += tl.load(place + ids, mask=inside, other=0.0).to(tl.float32) * scale - tl.load(lse_ptr + row)
        log_p = log_p / (count.to(tl.float32) + EPS)
    key = tl.where(log_p >= 0.0, 0, tl.abs(log_p).to(tl.int32, bitcast=True))
    return log_p, tl.where(tl.load(uncommon_ptr + ids, mask=inside, other=0) > 0, key, -1)


@triton.jit
def count_digits(
    logits_ptr, order_ptr, lse_ptr, uncommon_ptr, base, lse, first, count, V, T, stride_b, stride_t, scale,
    least, edge, width, STEP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Count the keys from `least` on per digit `(key - edge) >> width` in 0 .. 15, a byte per lane and digit.

    Keys before `edge` count for digit 0. One of STEP lines of ids is looked at.
    """
    low = tl.zeros((BLOCK,), dtype=tl.int64)
    high = tl.zeros((BLOCK,), dtype=tl.int64)
    lanes = tl.arange(0, BLOCK)
    lanes = lanes // LINE * (LINE * STEP) + lanes % LINE
    for start in range(0, V, BLOCK * STEP):
        _, key = chunk_keys(
            logits_ptr, order_ptr, lse_ptr, uncommon_ptr, base, lse, first, count, start + lanes, V, T,
            stride_b, stride_t, scale
        )  # fmt: skip
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
    logits_ptr, order_ptr, lse_ptr, uncommon_ptr, base, lse, first, count, V, T, stride_b, stride_t, scale,
    wanted, room, LEAST_WIDTH: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Find the last key to take and the number of equal ones: at least `wanted` keys, if possible at most `room`.

    Each turn narrows an interval of keys to a sixteenth, down to LEAST_WIDTH bits.
    """
    edge, width, before, counted, turn = FIRST_EDGE + 0, FIRST_WIDTH + 4, 0, room + 1, 0
    while (counted > room) & (width > LEAST_WIDTH):
        width = tl.maximum(width - 4, 0)
        least = tl.where(turn == 0, 0, edge)
        low, high = count_digits(
            logits_ptr, order_ptr, lse_ptr, uncommon_ptr, base, lse, first, count, V, T, stride_b, stride_t, scale,
            least, edge, width, STEP, BLOCK
        )  # fmt: skip
        digit, before_digit, up_to_digit = next_digit(low, high, before, wanted)
        outside = (turn == 0) & ((digit == 0) | (digit == 16))
        edge = tl.where(outside, 0, edge + (digit << width))
        width = tl.where(outside, 31, width)
        before = tl.where(outside, 0, before_digit)
        counted = tl.where(outside, room + 1, up_to_digit)
        turn += 1
    return edge + ((1 << width) - 1), tl.where(counted > room, wanted - before, V)


@triton.jit
def take(
    logits_ptr, order_ptr, lse_ptr, uncommon_ptr, base, lse, first, count, V, T, stride_b, stride_t, scale,
    values_ptr, ids_ptr, last, last_room, room, BLOCK: tl.constexpr
):  # fmt: skip
    """Store the keys before `last` and `last_room` equal to it; return their number and the sum over all ids."""
    taken, at_last = 0, 0
    mass = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        log_p, key = chunk_keys(
            logits_ptr, order_ptr, lse_ptr, uncommon_ptr, base, lse, first, count, ids, V, T, stride_b, stride_t, scale
        )
        p = tl.where(key >= 0, tl.exp(log_p), 0.0)
        mass += p
        before, equal = (key >= 0) & (key < last), (key >= 0) & (key == last)
        counted = tl.cumsum(before.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
        rank = at_last + (counted >> 16)
        to = taken + (counted & 0xFFFF) + tl.minimum(rank, last_room) - 1
        chosen = (before | (equal & (rank <= last_room))) & (to < room)
        tl.store(values_ptr + to, p, mask=chosen)
        tl.store(ids_ptr + to, ids, mask=chosen)
        total = tl.max(counted, axis=0)
        taken += total & 0xFFFF
        at_last += total >> 16
    return taken + tl.minimum(at_last, last_room), tl.sum(mass, axis=0)


@triton.jit(do_not_specialize=["T", "from_chunk", "wanted", "room", "u"])
def gold_select_kernel(
    logits_ptr, order_ptr, first_ptr, lse_ptr, uncommon_ptr, values_ptr, ids_ptr, mass_ptr,
    from_chunk, u, wanted, room, V, T, stride_b, stride_t, scale,
    MASS: tl.constexpr, STEP: tl.constexpr, COUNT_BLOCK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Select one chunk's `wanted` largest of `u` uncommon probabilities, with at most `room - wanted` more, by id.

    An edge is guessed from one of STEP lines of ids; if what lies before it is too little or does not fit into the
    room, it is found among all. Of too many equal ones at the edge the first are taken. Room that is left is filled
    with -1. A chunk without positions has probability 1 everywhere.
    """
    slot = tl.program_id(0).to(tl.int64)
    chunk = from_chunk + slot
    values_ptr += slot * room
    ids_ptr += slot * room
    first = tl.load(first_ptr + chunk)
    count = tl.load(first_ptr + chunk + 1) - first
    taken, mass, left = 0, u.to(tl.float32), 1.0
    if count > 0:
        row = tl.load(order_ptr + first)
        base = logits_ptr + row // T * stride_b + row % T * stride_t
        lse = tl.load(lse_ptr + row)
        guess = (wanted + room) // (2 * STEP)
        last, _ = find_edge(
            logits_ptr, order_ptr, lse_ptr, uncommon_ptr, base, lse, first, count, V, T, stride_b, stride_t, scale,
            tl.maximum(guess, 1), guess, GUESS_WIDTH, STEP, COUNT_BLOCK
        )  # fmt: skip
        last_room, fits, turn = V, False, 0
        while (turn < 2) & (fits == 0):
            if turn == 1:
                last, last_room = find_edge(
                    logits_ptr, order_ptr, lse_ptr, uncommon_ptr, base, lse, first, count, V, T, stride_b, stride_t,
                    scale, wanted, room, 0, 1, COUNT_BLOCK
                )  # fmt: skip
            taken, mass = take(
                logits_ptr, order_ptr, lse_ptr, uncommon_ptr, base, lse, first, count, V, T, stride_b, stride_t, scale,
                values_ptr, ids_ptr, last, last_room, room, BLOCK
            )  # fmt: skip
            fits = (taken >= wanted) & (taken <= room)
            turn += 1
        left = -1.0
    if MASS:
        tl.store(mass_ptr + chunk, tl.load(mass_ptr + chunk) + mass)
    for start in range(0, room - taken, BLOCK):
        place = taken + start + tl.arange(0, BLOCK)
        tl.store(values_ptr + place, tl.zeros((BLOCK,), dtype=tl.float32) + left, mask=place < room)
        tl.store(ids_ptr + place, tl.zeros((BLOCK,), dtype=tl.int32), mask=place < room)
