"""The Triton kernel of `gold` that picks the largest probabilities of a row, before they are sorted."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def count_digits(keys_ptr, u, border, shift, BLOCK: tl.constexpr):
    """How many keys there are per digit `(key - border) >> shift` in 0 .. 15, a byte per lane and digit."""
    low = tl.zeros((BLOCK,), dtype=tl.int64)
    high = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, u, BLOCK):
        place = start + tl.arange(0, BLOCK)
        key = tl.load(keys_ptr + place, mask=place < u, other=-1)
        digit = (key - border) >> shift
        one = tl.full((BLOCK,), 1, dtype=tl.int64) << ((digit & 7) * 8).to(tl.int64)
        there = key >= border
        low += tl.where(there & (digit < 8), one, 0)
        high += tl.where(there & (digit >= 8) & (digit < 16), one, 0)
    return low, high


@triton.jit
def next_digit(low, high, above, wanted):
    """The largest digit from which on at least `wanted` keys follow; how many lie above it, and from it on."""
    digit, kept, counted = -1, above, above
    for j in tl.static_range(16):
        lanes = high >> ((7 - j) * 8) if j < 8 else low >> ((15 - j) * 8)
        further = counted + tl.sum((lanes & 255).to(tl.int32), axis=0)
        found = (digit < 0) & (further >= wanted)
        digit = tl.where(found, 15 - j, digit)
        kept = tl.where(digit < 0, further, kept)
        counted = tl.where((digit < 0) | found, further, counted)
    return digit, kept, counted


@triton.jit(do_not_specialize=["wanted", "room"])
def gold_select_kernel(keys_ptr, values_ptr, places_ptr, u, wanted, room, BLOCK: tl.constexpr):
    """One row: its `wanted` largest keys, with at most `room - wanted` more, in the order of their places.

    Keys are the bits of numbers in `[0, 2)`. A border is found digit by digit, until the keys from it on fit into the
    room; of too many keys at the border the first are taken. Room that is left is filled with -1.
    """
    row = tl.program_id(0).to(tl.int64)
    keys_ptr += row * u
    border, above, counted, shift = 0, 0, u, 28
    while (shift >= 0) & (counted > room):
        low, high = count_digits(keys_ptr, u, border, shift, BLOCK)
        digit, above, counted = next_digit(low, high, above, wanted)
        border += digit << shift
        shift -= 4
    exact = counted > room  # then `above` keys lie above the border, and not all at it have room
    border_room = tl.where(exact, wanted - above, u)
    taken, at_border = 0, 0
    for start in range(0, u, BLOCK):
        place = start + tl.arange(0, BLOCK)
        key = tl.load(keys_ptr + place, mask=place < u, other=-1)
        equal = (key == border).to(tl.int32)
        rank = at_border + tl.cumsum(equal, axis=0)
        chosen = ((key > border) | ((equal > 0) & (rank <= border_room))).to(tl.int32)
        to = row * room + taken + tl.cumsum(chosen, axis=0) - 1
        tl.store(values_ptr + to, key.to(tl.float32, bitcast=True), mask=chosen > 0)
        tl.store(places_ptr + to, place, mask=chosen > 0)
        taken += tl.sum(chosen, axis=0)
        at_border += tl.sum(equal, axis=0)
    for start in range(0, room - taken, BLOCK):
        slot = taken + start + tl.arange(0, BLOCK)
        tl.store(values_ptr + row * room + slot, tl.full((BLOCK,), -1.0, dtype=tl.float32), mask=slot < room)
        tl.store(places_ptr + row * room + slot, tl.zeros((BLOCK,), dtype=tl.int32), mask=slot < room)
