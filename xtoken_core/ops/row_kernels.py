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
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, NAN, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def added_exp(total, running, x):
    """Return `sum exp(. - maximum)` and the maximum after one more value, with one exponential for both."""
    larger = x > running
    e = tl.exp(tl.where(larger, running - x, x - running))
    return tl.where(larger, total * e + 1.0, total + e), tl.where(larger, x, running)


@triton.jit
def lanes_log_sum_exp(total, running):
    """Return `log sum exp` over lanes that each hold their maximum and their sum, and the largest maximum."""
    top = tl.max(running, axis=0)
    return tl.log(tl.sum(total * tl.exp(running - top), axis=0)) + top, top


@triton.jit
def row_log_sum_exp(base, V, scale, BLOCK: tl.constexpr):
    """Compute `log sum exp(scale * x)` of the V values at `base`, lane by lane and then across."""
    columns = tl.arange(0, BLOCK)
    running = tl.full((BLOCK,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(base + start + columns, mask=start + columns < V, other=float("-inf")).to(tl.float32) * scale
        total, running = added_exp(total, running, x)
    lse, _ = lanes_log_sum_exp(total, running)
    return lse


@triton.jit(do_not_specialize=["T"])
def row_statistics_kernel(
    logits_ptr,
    targets_ptr,
    lse_ptr,
    target_logit_ptr,
    best_ptr,
    T,
    V,
    stride_b,
    stride_t,
    BLOCK: tl.constexpr,
):
    """Compute one row's `log sum exp x`, its target's logit and the lowest id of its maximum."""
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row // T * stride_b + row % T * stride_t
    columns = tl.arange(0, BLOCK)
    running = tl.full((BLOCK,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    guess = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, V, BLOCK):
        x = tl.load(base + start + columns, mask=start + columns < V, other=float("-inf")).to(tl.float32)
        guess = tl.where(x > running, start + columns, guess)
        total, running = added_exp(total, running, x)
    lse, top = lanes_log_sum_exp(total, running)
    tl.store(lse_ptr + row, lse)
    tl.store(best_ptr + row, tl.min(tl.where(running == top, guess, V), axis=0).to(tl.int64))
    tl.store(target_logit_ptr + row, tl.load(base + tl.load(targets_ptr + row)).to(tl.float32))
