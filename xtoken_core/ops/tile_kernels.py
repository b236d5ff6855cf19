"""Triton code over tiles of logits: statistics per tile, combined per row in a fixed order.

A buffer of partial results is `[parts, padded rows]`, so that neighbouring rows lie side by side.
"""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_bases(logits_ptr, rows, T, stride_b, stride_t):
    """Return the first logit of each row; row r is position r % T of sample r // T."""
    # A division in 32 bits is a fifth of one in 64.
    rows = rows.to(tl.int32)
    return logits_ptr + (rows // T).to(tl.int64) * stride_b + (rows % T).to(tl.int64) * stride_t


@triton.jit
def exp_above(x, pivot, scale):
    """Return `exp((x - pivot) * scale)` by the power of 2, of tiles `[rows, columns]` and one pivot a row."""
    # A product less a product is one instruction and `exp2` another one, where `exp` takes five.
    return tl.exp2(x * (scale * LOG2_E) - (pivot * (scale * LOG2_E))[:, None])


@triton.jit
def in_lines(rows, height, LINE: tl.constexpr):
    """Return the offsets of positions in a buffer `[lines, height, LINE]`; column k is `k * LINE` further."""
    return (rows // LINE).to(tl.int64) * (height * LINE) + rows % LINE


@triton.jit
def tile_of_lines(tile, height, ROWS: tl.constexpr, LINE: tl.constexpr):
    """Return `in_lines` of the first position of tile number `tile`, as products that show how it is aligned."""
    per_line: tl.constexpr = LINE // ROWS
    return tile // per_line * (height * LINE) + tile % per_line * ROWS


@triton.jit
def store_tile_sums(x, scale, top_ptr, total_ptr, places):
    """Store per row of a tile `[rows, columns]` the maximum of `z = x * scale`, and `sum exp(z - maximum)`."""
    top = tl.max(x, axis=1)
    pivot = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    tl.store(top_ptr + places, top * scale)
    tl.store(total_ptr + places, tl.sum(exp_above(x, pivot, scale), axis=1))


@triton.jit
def combined_log_sum_exp(top_ptr, total_ptr, rows, parts, padded, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Return each row's maximum and `log sum exp` from the sums of its tiles."""
    # [PARTS, ROWS]: the maximum first, then every sum at that pivot. Parts are added in a fixed order, lane by lane.
    lanes = tl.arange(0, PARTS).to(tl.int64)
    tops = tl.full((PARTS, ROWS), float("-inf"), dtype=tl.float32)
    for start in range(0, parts, PARTS):
        places = (start + lanes)[:, None] * padded + rows[None, :]
        tops = tl.maximum(tops, tl.load(top_ptr + places, mask=(start + lanes < parts)[:, None], other=float("-inf")))
    top = tl.max(tops, axis=0)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    totals = tl.zeros((PARTS, ROWS), dtype=tl.float32)
    for start in range(0, parts, PARTS):
        places = (start + lanes)[:, None] * padded + rows[None, :]
        mask = (start + lanes < parts)[:, None]
        factor = tl.exp(tl.load(top_ptr + places, mask=mask, other=float("-inf")) - pivot[None, :])
        totals += tl.load(total_ptr + places, mask=mask, other=0.0) * factor
    return top, tl.log(tl.sum(totals, axis=0)) + pivot


@triton.jit
def combined_sum(partial_ptr, rows, parts, padded, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Return each row's sum of its parts."""
    lanes = tl.arange(0, PARTS).to(tl.int64)
    totals = tl.zeros((PARTS, ROWS), dtype=tl.float32)
    for start in range(0, parts, PARTS):
        places = (start + lanes)[:, None] * padded + rows[None, :]
        totals += tl.load(partial_ptr + places, mask=(start + lanes < parts)[:, None], other=0.0)
    return tl.sum(totals, axis=0)


@triton.jit
def sum_kernel(partial_ptr, total_ptr, parts, padded, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Compute the sum over the parts of ROWS rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(total_ptr + rows, combined_sum(partial_ptr, rows, parts, padded, PARTS, ROWS))


@triton.jit
def combined_argmax(best_ptr, place_ptr, rows, parts, padded, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Return the lowest index of each row's maximum, from its parts' maxima and their lowest indices."""
    lanes = tl.arange(0, PARTS).to(tl.int64)
    best = tl.full((PARTS, ROWS), float("-inf"), dtype=tl.float32)
    at = tl.full((PARTS, ROWS), 2147483647, dtype=tl.int32)
    for start in range(0, parts, PARTS):
        places = (start + lanes)[:, None] * padded + rows[None, :]
        mask = (start + lanes < parts)[:, None]
        value = tl.load(best_ptr + places, mask=mask, other=float("-inf"))
        place = tl.load(place_ptr + places, mask=mask, other=2147483647)
        # Equal maxima: the lower index, in lanes here and among lanes below.
        at = tl.where((value > best) | ((value == best) & (place < at)), place, at)
        best = tl.maximum(best, value)
    top = tl.max(best, axis=0)
    return tl.min(tl.where(best == top[None, :], at, 2147483647), axis=0)
