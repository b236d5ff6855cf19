"""The Triton kernel of `gold` that compares two lists of probabilities as if both were sorted, without sorting them.

The `i`-th largest of one list is above that of the other if fewer than `i + 1` of the other's are as large. Bins of
probabilities are counted on both sides; ranks within a bin are needed only where the other side's run of ranks begins
or ends inside it, or the cut does.
"""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

STUDENT = tl.constexpr(0)
TEACHER = tl.constexpr(16)
"""Lowest bit of each side's 16 in a word that counts both."""
UNIT = tl.constexpr(70368744177664.0)
"""2^46: undecided entries are added up as whole multiples of its inverse, so that their order does not matter."""


@triton.jit
def entries(values_ptr, start, width, BLOCK: tl.constexpr):
    """Return a block of a list from `start` on: indices, probabilities, and which exist and are above zero."""
    at = tl.max_contiguous(start + tl.arange(0, BLOCK), 1)  # one a thread, as the tables' places: no other layout
    p = tl.load(values_ptr + at, mask=at < width, other=-1.0)
    return at, p, p > 0.0


@triton.jit
def bits_of(p):
    """Return the bits of positive numbers, ordered as the numbers are."""
    return p.to(tl.int32, bitcast=True)


@triton.jit
def half(word, side: tl.constexpr):
    """Unpack one side's 16-bit count from a word that holds both."""
    return (word >> side) & 0xFFFF


@triton.jit
def edges(a_ptr, b_ptr, a_width, b_width, BLOCK: tl.constexpr):
    """Return the largest and the smallest bits of two lists' positive entries."""
    highest = tl.full((BLOCK,), 0, dtype=tl.int32)
    lowest = tl.full((BLOCK,), 0x7FFFFFFF, dtype=tl.int32)
    for start in range(0, tl.maximum(a_width, b_width), BLOCK):
        _, a, a_there = entries(a_ptr, start, a_width, BLOCK)
        _, b, b_there = entries(b_ptr, start, b_width, BLOCK)
        highest = tl.maximum(highest, tl.maximum(bits_of(a), bits_of(b)))  # those of -1 are negative
        lowest = tl.minimum(lowest, tl.where(a_there, bits_of(a), 0x7FFFFFFF))
        lowest = tl.minimum(lowest, tl.where(b_there, bits_of(b), 0x7FFFFFFF))
    return tl.max(highest, axis=0), tl.min(lowest, axis=0)


@triton.jit
def clear_bins(counts_ptr, top, least, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Set every bin's count to 0; return the bits of a bin's width with which they reach from `top` to `least`."""
    for start in range(0, BINS, BLOCK):
        tl.store(counts_ptr + start + tl.arange(0, BLOCK), tl.zeros((BLOCK,), dtype=tl.int32))
    shift = 0
    while (tl.maximum(top - least, 0) >> shift) >= BINS:
        shift += 1
    return shift


@triton.jit
def count_bins(a_ptr, b_ptr, counts_ptr, a_width, b_width, top, shift, BLOCK: tl.constexpr):
    """Count two lists' positive entries per bin."""
    # The student's count is in the low 16 bits of a bin's word, the teacher's in the high ones. The launch chooses this
    # kernel only for lists of at most MOST_COUNTED = 65,535 entries, so that no count carries into the other.
    one = tl.full((BLOCK,), 1, dtype=tl.int32)
    for start in range(0, tl.maximum(a_width, b_width), BLOCK):
        _, a, a_there = entries(a_ptr, start, a_width, BLOCK)
        _, b, b_there = entries(b_ptr, start, b_width, BLOCK)
        tl.atomic_add(counts_ptr + ((top - bits_of(a)) >> shift), one, mask=a_there, sem="relaxed")
        tl.atomic_add(counts_ptr + ((top - bits_of(b)) >> shift), one << 16, mask=b_there, sem="relaxed")


@triton.jit
def split(lo, hi, other_lo, other_hi, n):
    """Return the sign that a run of ranks `lo .. hi - 1` has in common, and if it has not.

    The other side's entries of the same bin have the ranks `other_lo .. other_hi - 1`; ranks from `n` on do not count.
    """
    below, above = hi <= tl.minimum(other_lo, n), (lo >= other_hi) & (hi <= n)
    return above.to(tl.int32) - below.to(tl.int32), (below == 0) & (above == 0) & (lo < n)


@triton.jit
def runs(begins_ptr, bins, there, side: tl.constexpr):
    """Return the runs of ranks of bins: one side's, then the other's."""
    begin = tl.load(begins_ptr + bins, mask=there, other=0)
    end = tl.load(begins_ptr + bins + 1, mask=there, other=0)
    return half(begin, side), half(end, side), half(begin, 16 - side), half(end, 16 - side)


@triton.jit
def begin_bins(counts_ptr, begins_ptr, places_ptr, mixed_ptr, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Store where each bin's ranks and the places of its undecided entries begin; return the number of places.

    The places also replace the counts, and count on from there.
    """
    ranks, number = 0, 0
    for start in range(0, BINS, BLOCK):
        bins = start + tl.arange(0, BLOCK)
        # Sums of packed words are packed sums: both sides' ranks and places end at most at their numbers of entries,
        # which fit 16 bits (see `count_bins`).
        count = tl.load(counts_ptr + bins)
        end = ranks + tl.cumsum(count, axis=0)
        begin = end - count
        lo, hi, other_lo, other_hi = half(begin, 0), half(end, 0), half(begin, 16), half(end, 16)
        _, of_student = split(lo, hi, other_lo, other_hi, n)
        _, of_teacher = split(other_lo, other_hi, lo, hi, n)
        undecided = tl.where(of_student, hi - lo, 0) + (tl.where(of_teacher, other_hi - other_lo, 0) << 16)
        place = number + tl.cumsum(undecided, axis=0) - undecided
        tl.store(begins_ptr + bins, begin)
        tl.store(places_ptr + bins, place)
        tl.store(counts_ptr + bins, place)
        tl.store(mixed_ptr + bins, tl.zeros((BLOCK,), dtype=tl.int8))
        tl.store(mixed_ptr + BINS + bins, tl.zeros((BLOCK,), dtype=tl.int8))
        ranks += tl.sum(count, axis=0)
        number += tl.sum(undecided, axis=0)
    tl.store(begins_ptr + BINS, ranks)
    return number


@triton.jit
def next_place(next_ptr, bins, held, side: tl.constexpr):
    """Take the next place of each undecided entry's bin."""
    one = tl.full(bins.shape, 1, dtype=tl.int32) << side
    return half(tl.atomic_add(next_ptr + bins, one, mask=held, sem="relaxed"), side)


@triton.jit
def mark_mixed(
    next_ptr, places_ptr, mixed_ptr, held_ptr, held_at_ptr, bins, p, at, place, begin, held, side: tl.constexpr
):
    """Store with each undecided entry where those of its block begin and end; mark bins with more than one value."""
    end = half(tl.load(next_ptr + bins, mask=held, other=0), side)
    tl.store(held_at_ptr + 2 * place, at, mask=held)
    tl.store(held_at_ptr + 2 * place + 1, begin + (end << 16), mask=held)
    first = half(tl.load(places_ptr + bins, mask=held, other=0), side)
    differs = held & (tl.load(held_ptr + first, mask=held, other=0.0) != p)
    tl.store(mixed_ptr + bins, tl.full(bins.shape, 1, dtype=tl.int8), mask=differs)


@triton.jit
def decide_bins(
    a_ptr,
    b_ptr,
    next_ptr,
    begins_ptr,
    places_ptr,
    a_mixed_ptr,
    b_mixed_ptr,
    a_held_ptr,
    b_held_ptr,
    a_at_ptr,
    b_at_ptr,
    ids_ptr,
    to_ptr,
    a_width,
    b_width,
    top,
    shift,
    n,
    BLOCK: tl.constexpr,
):
    """Decide the entries whose bins have one sign; move the others next to each other, bin by bin.

    Within a bin those of a block lie together. Return the sums of each side's decided entries times their signs; the
    student's signs are stored at its ids.
    """
    a_sum, b_sum = tl.zeros((BLOCK,), dtype=tl.float32), tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, tl.maximum(a_width, b_width), BLOCK):
        at, a, a_there = entries(a_ptr, start, a_width, BLOCK)
        _, b, b_there = entries(b_ptr, start, b_width, BLOCK)
        a_bins, b_bins = (top - bits_of(a)) >> shift, (top - bits_of(b)) >> shift
        lo, hi, other_lo, other_hi = runs(begins_ptr, a_bins, a_there, STUDENT)
        sign, undecided = split(lo, hi, other_lo, other_hi, n)
        a_held, chosen = a_there & undecided, a_there & (sign != 0)
        a_sum += tl.where(a_there, sign.to(tl.float32) * a, tl.where(a != a, a, 0.0))  # NaN stays NaN
        tl.store(to_ptr + tl.load(ids_ptr + at, mask=chosen, other=0), sign.to(tl.int8), mask=chosen)
        lo, hi, other_lo, other_hi = runs(begins_ptr, b_bins, b_there, TEACHER)
        sign, undecided = split(lo, hi, other_lo, other_hi, n)
        b_held = b_there & undecided
        b_sum += tl.where(b_there, sign.to(tl.float32) * b, tl.where(b != b, b, 0.0))  # NaN stays NaN
        a_begin = half(tl.load(next_ptr + a_bins, mask=a_held, other=0), STUDENT)
        b_begin = half(tl.load(next_ptr + b_bins, mask=b_held, other=0), TEACHER)
        tl.debug_barrier()
        a_place = next_place(next_ptr, a_bins, a_held, STUDENT)
        b_place = next_place(next_ptr, b_bins, b_held, TEACHER)
        tl.store(a_held_ptr + a_place, a, mask=a_held)
        tl.store(b_held_ptr + b_place, b, mask=b_held)
        tl.debug_barrier()
        mark_mixed(
            next_ptr, places_ptr, a_mixed_ptr, a_held_ptr, a_at_ptr, a_bins, a, at, a_place, a_begin, a_held, STUDENT
        )
        mark_mixed(
            next_ptr, places_ptr, b_mixed_ptr, b_held_ptr, b_at_ptr, b_bins, b, at, b_place, b_begin, b_held, TEACHER
        )
    return tl.sum(a_sum, axis=0), tl.sum(b_sum, axis=0)


@triton.jit
def compare_others(held_ptr, places_ptr, mixed_ptr, bins, p, size, side: tl.constexpr):
    """Count the other side's undecided entries of the same bins, `size` each, that are larger and at least as large."""
    first = half(tl.load(places_ptr + bins, mask=size > 0, other=0), side)
    mixed = tl.load(mixed_ptr + bins, mask=size > 0, other=0) != 0
    turns = tl.where(mixed, size, tl.minimum(size, 1))
    each = tl.where(mixed, 1, size)  # equal ones are compared at once
    larger, as_large = tl.zeros_like(size), tl.zeros_like(size)
    for j in range(tl.max(turns, axis=0)):
        q = tl.load(held_ptr + first + j, mask=j < turns, other=0.0)
        larger += tl.where(q > p, each, 0)
        as_large += tl.where(q >= p, each, 0)
    return larger, as_large


@triton.jit
def decide_entries(
    held_ptr,
    held_at_ptr,
    other_held_ptr,
    begins_ptr,
    places_ptr,
    mixed_ptr,
    other_mixed_ptr,
    ids_ptr,
    to_ptr,
    number,
    top,
    shift,
    n,
    side: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decide the other entries by their ranks: equal ones are ranked in the order of the list.

    Return the sum of the entries times their signs; SPREAD stores the signs at the ids.
    """
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, number, BLOCK):
        i = tl.max_contiguous(start + tl.arange(0, BLOCK), 1)
        there = i < number
        p = tl.load(held_ptr + i, mask=there, other=1.0)
        at = tl.load(held_at_ptr + 2 * i, mask=there, other=0)
        block = tl.load(held_at_ptr + 2 * i + 1, mask=there, other=0)
        bins = (top - bits_of(p)) >> shift
        lo, hi, other_lo, other_hi = runs(begins_ptr, bins, there, side)
        first = half(tl.load(places_ptr + bins, mask=there, other=0), side)
        mixed = tl.load(mixed_ptr + bins, mask=there, other=0) != 0
        begin = tl.where(mixed, first, half(block, 0))  # equal ones before it in the list lie before its block
        turns = tl.where(mixed, hi - lo, half(block, 16) - begin)
        rank = lo + begin - first
        for j in range(tl.max(turns, axis=0)):
            q = tl.load(held_ptr + begin + j, mask=j < turns, other=0.0)
            earlier = tl.load(held_at_ptr + 2 * (begin + j), mask=j < turns, other=0) < at
            rank += ((q > p) | ((q == p) & earlier)).to(tl.int32)
        _, compared = split(other_lo, other_hi, lo, hi, n)
        compared = compared & there
        size = tl.where(compared, other_hi - other_lo, 0)
        larger, as_large = compare_others(other_held_ptr, places_ptr, other_mixed_ptr, bins, p, size, 16 - side)
        as_large = tl.where(compared, other_lo + as_large, other_hi)
        sign = (rank >= as_large).to(tl.int32) - (rank < other_lo + larger).to(tl.int32)
        sign = tl.where(there & (rank < n), sign, 0)
        total += sign.to(tl.int64) * (p * UNIT).to(tl.int64)
        if SPREAD:
            v = tl.load(ids_ptr + at, mask=sign != 0, other=0)
            tl.store(to_ptr + v, sign.to(tl.int8), mask=sign != 0)
    return tl.sum(total, axis=0).to(tl.float32) / UNIT


@triton.jit
def widths_of(student_size_ptr, teacher_size_ptr, slot):
    """Return how much of a chunk's lists is compared: nothing if neither side has a position."""
    a, b = tl.load(student_size_ptr + slot), tl.load(teacher_size_ptr + slot)
    compared = (a > 0) | (b > 0)
    return tl.where(compared, tl.abs(a), 0), tl.where(compared, tl.abs(b), 0)


@triton.jit(do_not_specialize=["from_chunk", "rows", "n"])
def gold_tail_kernel(
    student_ptr,
    student_size_ptr,
    ids_ptr,
    teacher_ptr,
    teacher_size_ptr,
    l1_ptr,
    slope_ptr,
    to_ptr,
    tables_ptr,
    mixed_ptr,
    held_ptr,
    held_at_ptr,
    from_chunk,
    rows,
    n,
    student_width,
    teacher_width,
    ids_stride,
    V,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute chunks' L1 distances of two lists cut to their `n` largest; store the signs at the student's ids.

    A program takes every `num_programs`-th chunk with scratch of its own. The sizes of lists of chunks without
    positions, which are all ones, are negative.
    """
    program, width = tl.program_id(0).to(tl.int64), student_width + teacher_width
    next_ptr = tables_ptr + program * (3 * BINS + 16)
    begins_ptr, places_ptr = next_ptr + 2 * BINS, next_ptr + BINS
    a_mixed_ptr, b_mixed_ptr = mixed_ptr + program * (2 * BINS), mixed_ptr + program * (2 * BINS) + BINS
    a_held_ptr, b_held_ptr = held_ptr + program * width, held_ptr + program * width + student_width
    a_at_ptr, b_at_ptr = held_at_ptr + program * 2 * width, held_at_ptr + program * 2 * width + 2 * student_width
    for slot in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.zeros((), dtype=tl.int64) + slot
        chunk = from_chunk + row
        a_ptr, b_ptr = student_ptr + row * student_width, teacher_ptr + row * teacher_width
        own_ids_ptr, own_to_ptr = ids_ptr + row * ids_stride, to_ptr + chunk * V
        a_width, b_width = widths_of(student_size_ptr, teacher_size_ptr, row)
        top, least = edges(a_ptr, b_ptr, a_width, b_width, BLOCK)
        shift = clear_bins(next_ptr, top, least, BINS, BLOCK)
        tl.debug_barrier()
        count_bins(a_ptr, b_ptr, next_ptr, a_width, b_width, top, shift, BLOCK)
        tl.debug_barrier()
        number = begin_bins(next_ptr, begins_ptr, places_ptr, a_mixed_ptr, n, BINS, BLOCK)
        tl.debug_barrier()
        a_sum, b_sum = decide_bins(
            a_ptr,
            b_ptr,
            next_ptr,
            begins_ptr,
            places_ptr,
            a_mixed_ptr,
            b_mixed_ptr,
            a_held_ptr,
            b_held_ptr,
            a_at_ptr,
            b_at_ptr,
            own_ids_ptr,
            own_to_ptr,
            a_width,
            b_width,
            top,
            shift,
            n,
            BLOCK,
        )
        tl.debug_barrier()
        a_sum += decide_entries(
            a_held_ptr,
            a_at_ptr,
            b_held_ptr,
            begins_ptr,
            places_ptr,
            a_mixed_ptr,
            b_mixed_ptr,
            own_ids_ptr,
            own_to_ptr,
            half(number, STUDENT),
            top,
            shift,
            n,
            STUDENT,
            True,
            BLOCK,
        )
        b_sum += decide_entries(
            b_held_ptr,
            b_at_ptr,
            a_held_ptr,
            begins_ptr,
            places_ptr,
            b_mixed_ptr,
            a_mixed_ptr,
            own_ids_ptr,
            own_to_ptr,
            half(number, TEACHER),
            top,
            shift,
            n,
            TEACHER,
            False,
            BLOCK,
        )
        tl.store(slope_ptr + chunk, a_sum)
        tl.store(l1_ptr + chunk, a_sum + b_sum)
        tl.debug_barrier()
