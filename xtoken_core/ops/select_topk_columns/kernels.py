"""The Triton kernels of `select_topk_columns`.

A column's maximum becomes a key, an integer in the order of the floats. The smallest key that is chosen, the border, is
computed byte by byte, from the first one on: keys that begin as the border does are counted per next byte.
"""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.row_kernels import ordered_bits

DIGITS = tl.constexpr(256)
"""Values of a byte."""


@triton.jit(do_not_specialize=["R", "T"])
def column_maxima_kernel(
    logits_ptr, partial_ptr, R, T, V, stride_b, stride_t, PER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Compute maxima of COLUMNS columns over PER rows, NaN largest. Row r is position r % T of sample r // T."""
    first = tl.program_id(0) * PER
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    best = tl.full((ROWS, COLUMNS), float("-inf"), dtype=tl.float32)  # ROWS rows are loaded at once
    for start in range(0, PER, ROWS):
        rows = first + start + tl.arange(0, ROWS)
        bases = logits_ptr + (rows // T).to(tl.int64) * stride_b + (rows % T).to(tl.int64) * stride_t
        inside = (rows < R)[:, None] & (columns < V)[None, :]
        x = tl.load(bases[:, None] + columns[None, :], mask=inside, other=float("-inf")).to(tl.float32)
        best = tl.where((x > best) | (x != x), x, best)  # NaN stays: nothing is > NaN
    nan = tl.max((best != best).to(tl.int32), axis=0) > 0
    highest = tl.where(nan, float("nan"), tl.max(best, axis=0))
    tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * V + columns, highest, mask=columns < V)


@triton.jit
def add_histogram(counts_ptr, digit, counted):
    """Add a block's numbers of digits to those of all blocks."""
    count = tl.histogram(tl.where(counted, digit, 0), DIGITS)
    bins = tl.arange(0, DIGITS)
    # What does not count went to digit 0.
    count -= tl.where(bins == 0, tl.sum((counted == 0).to(tl.int32), axis=0), 0)
    tl.atomic_add(counts_ptr + bins, count, mask=count > 0, sem="relaxed")


@triton.jit
def find_digit(counts_ptr, wanted):
    """Return the largest digit from which on there are `wanted` keys, and how many of its keys are wanted."""
    bins = tl.arange(0, DIGITS)
    count = tl.load(counts_ptr + bins)
    # Keys with a larger digit; the border's digit is where their number passes `wanted`.
    larger = tl.sum(count, axis=0) - tl.cumsum(count, axis=0)
    of_border = (larger < wanted) & (larger + count >= wanted)
    return tl.sum(tl.where(of_border, bins, 0), axis=0), wanted - tl.sum(tl.where(of_border, larger, 0), axis=0)


@triton.jit
def border_of(counts_ptr, wanted, BYTES: tl.constexpr):
    """Return the border's first BYTES bytes as the keys have them, and how many keys that begin so are wanted."""
    digit, wanted = find_digit(counts_ptr, wanted)
    border = digit - DIGITS // 2  # keys are signed
    for byte in tl.static_range(1, BYTES):
        digit, wanted = find_digit(counts_ptr + byte * DIGITS, wanted)
        border = border * DIGITS + digit
    return border, wanted


@triton.jit(do_not_specialize=["parts"])
def column_keys_kernel(partial_ptr, keys_ptr, counts_ptr, parts, V, BLOCK: tl.constexpr):
    """Compute a block of keys from parts of the columns' maxima, and count their first bytes."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for part in range(parts):
        x = tl.load(partial_ptr + tl.cast(part, tl.int64) * V + i, mask=i < V, other=float("-inf"))
        best = tl.where((x > best) | (x != x), x, best)
    key = ordered_bits(best)
    tl.store(keys_ptr + i, key, mask=i < V)
    add_histogram(counts_ptr, (key >> 24) + DIGITS // 2, i < V)


@triton.jit(do_not_specialize=["k"])
def count_digits_kernel(keys_ptr, counts_ptr, V, k, BYTE: tl.constexpr, BLOCK: tl.constexpr):
    """Count the next bytes of a block's keys whose first BYTE bytes are the border's."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + i, mask=i < V, other=0)
    # Every program derives the border again from the counts so far, so that no launch has to store it.
    border, _ = border_of(counts_ptr, k, BYTE)
    shift: tl.constexpr = 24 - 8 * BYTE
    add_histogram(counts_ptr + BYTE * DIGITS, (key >> shift) & (DIGITS - 1), (i < V) & ((key >> (shift + 8)) == border))


@triton.jit(do_not_specialize=["k"])
def count_chosen_kernel(keys_ptr, counts_ptr, above_ptr, equal_ptr, V, k, BLOCK: tl.constexpr):
    """Count a block's keys above the border and equal to it."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    border, _ = border_of(counts_ptr, k, 4)
    key = tl.load(keys_ptr + i, mask=i < V, other=0)
    tl.store(above_ptr + tl.program_id(0), tl.sum(((key > border) & (i < V)).to(tl.int32), axis=0))
    tl.store(equal_ptr + tl.program_id(0), tl.sum(((key == border) & (i < V)).to(tl.int32), axis=0))


@triton.jit
def sum_before(counts_ptr, end, LANES: tl.constexpr):
    """Return the sum of the first `end` counts."""
    total = tl.zeros((LANES,), dtype=tl.int32)
    for start in range(0, end, LANES):
        n = start + tl.arange(0, LANES)
        total += tl.load(counts_ptr + n, mask=n < end, other=0)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["k"])
def chosen_columns_kernel(
    keys_ptr, counts_ptr, above_ptr, equal_ptr, columns_ptr, V, k, LANES: tl.constexpr, BLOCK: tl.constexpr
):
    """Store each selected id at its rank: ids above the border; ties by lowest index."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    border, wanted = border_of(counts_ptr, k, 4)
    key = tl.load(keys_ptr + i, mask=i < V, other=0)
    is_above, is_equal = (key > border) & (i < V), (key == border) & (i < V)
    # Ranks in the order of ids: chosen ones of earlier blocks, then those before it in this one.
    above = sum_before(above_ptr, tl.program_id(0), LANES) + tl.cumsum(is_above.to(tl.int32), axis=0)
    equal = sum_before(equal_ptr, tl.program_id(0), LANES) + tl.cumsum(is_equal.to(tl.int32), axis=0)
    chosen = is_above | (is_equal & (equal <= wanted))
    tl.store(columns_ptr + above + tl.minimum(equal, wanted) - 1, i.to(tl.int64), mask=chosen)
