"""Triton code over rows of logits that several ops share."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

LOWEST = tl.constexpr(-3.0e38)
"""Below every logit but -inf, from which it can be subtracted."""
NAN = tl.constexpr(0x7FC00000)


@triton.jit
def ordered_bits(x):
    """Return integers in the order of float32 values: -0.0 equals 0.0, NaN is the largest."""
    # The sign bit is in front: of negative numbers the other bits are inverted, so that larger ones come later.
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, NAN, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def largest(x):
    """Return a block's largest logit, which is at least LOWEST and not NaN."""
    return tl.max(tl.where(x > LOWEST, x, LOWEST), axis=0)


@triton.jit
def first_of(x, top, columns):
    """Return the lowest column that holds a block's largest logit, 0 if it has none above LOWEST."""
    return tl.where(top > LOWEST, tl.min(tl.where(x == top, columns, 2147483647), axis=0), 0)


@triton.jit
def hand_over(slot_ptr, high, low):
    """Write two float32 numbers, not both 0, as one word, which the other programs of the row find whole or 0."""
    high, low = high.to(tl.int32, bitcast=True).to(tl.int64), low.to(tl.int32, bitcast=True).to(tl.int64)
    # Without its sign, which would spread over the upper half.
    tl.atomic_xchg(slot_ptr, (high << 32) | (low & 0xFFFFFFFF), sem="relaxed")


@triton.jit
def handed_over(slots_ptr, PARTS: tl.constexpr, SLOTS: tl.constexpr):
    """Wait for the words of all programs of a row and return their numbers, LOWEST and 0 behind the last.

    Programs are started in the order of their numbers, and those of a row are neighbours: the first row that is not
    done has all of its own running or next in turn, so that it is done some time, and then the next one is.
    """
    n = tl.arange(0, SLOTS)
    words = tl.load(slots_ptr + n, mask=n < PARTS, other=1, volatile=True)
    while tl.min((words != 0).to(tl.int32), axis=0) == 0:
        words = tl.load(slots_ptr + n, mask=n < PARTS, other=1, volatile=True)
    high = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    low = (words & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(n < PARTS, high, LOWEST), tl.where(n < PARTS, low, 0.0)


@triton.jit
def over_parts(slots_ptr, PARTS: tl.constexpr, SLOTS: tl.constexpr):
    """Return a row's `log sum exp`, its sum, the factors of its parts' sums, and the first part with its largest."""
    tops, totals = handed_over(slots_ptr, PARTS, SLOTS)
    top = tl.max(tops, axis=0)
    factors = tl.exp(tops - top)
    total = tl.sum(totals * factors, axis=0)
    return tl.log(total) + top, total, factors, tl.min(tl.where(tops == top, tl.arange(0, SLOTS), SLOTS), axis=0)
