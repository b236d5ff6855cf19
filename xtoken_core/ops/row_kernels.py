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
def added_exp(total, running, x):
    """Return `sum exp(. - maximum)` and the maximum after one more value, with one exponential for both."""
    # Either the new term is rescaled or the old sum is; one exponential of a number that is not positive does both.
    larger = x > running
    e = tl.exp(tl.where(larger, running - x, x - running))
    return tl.where(larger, total * e + 1.0, total + e), tl.where(larger, x, running)


@triton.jit
def lanes_log_sum_exp(total, running):
    """Return `log sum exp` over lanes that each hold their maximum and their sum, and the largest maximum."""
    top = tl.max(running, axis=0)
    return tl.log(tl.sum(total * tl.exp(running - top), axis=0)) + top, top


@triton.jit
def added_tile(total, running, guess, x, columns, V):
    """Return the lanes' sums, maxima and the maxima's columns after one more tile; columns from V on are `-inf`."""
    x = tl.where(columns < V, x.to(tl.float32), float("-inf"))
    guess = tl.where(x > running, columns, guess)
    total, running = added_exp(total, running, x)
    return total, running, guess


@triton.jit(do_not_specialize=["T"])
def row_statistics_kernel(
    logits_ptr,
    matrix,
    targets_ptr,
    lse_ptr,
    target_logit_ptr,
    best_ptr,
    T,
    V,
    stride_b,
    stride_t,
    STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one row's `log sum exp x`, its target's logit and the lowest id of its maximum.

    With STAGES the row is read by TMA, from `matrix`: all logits in rows of WIDTH (`row_matrix`).
    """
    row = tl.program_id(0).to(tl.int64)
    offset = row // T * stride_b + row % T * stride_t
    base = logits_ptr + offset
    columns = tl.arange(0, BLOCK)
    running = tl.full((BLOCK,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    guess = tl.zeros((BLOCK,), dtype=tl.int32)
    # By TMA tiles are on their way while earlier ones are added up; a tile can end in the next row, and is masked.
    if STAGES > 0:
        for start in tl.range(0, V, BLOCK, num_stages=STAGES):
            x = tl.reshape(matrix.load([((offset + start) // WIDTH).to(tl.int32), 0]), (BLOCK,))
            total, running, guess = added_tile(total, running, guess, x, start + columns, V)
    else:
        for start in range(0, V, BLOCK):
            x = tl.load(base + start + columns, mask=start + columns < V, other=float("-inf"))
            total, running, guess = added_tile(total, running, guess, x, start + columns, V)
    lse, top = lanes_log_sum_exp(total, running)
    tl.store(lse_ptr + row, lse)
    tl.store(best_ptr + row, tl.min(tl.where(running == top, guess, V), axis=0).to(tl.int64))  # lowest id
    tl.store(target_logit_ptr + row, tl.load(base + tl.load(targets_ptr + row)).to(tl.float32))
