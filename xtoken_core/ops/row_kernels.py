"""Triton code over rows of logits that several ops share."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def row_log_sum_exp(base, V, scale, BLOCK: tl.constexpr):
    """Compute `log sum exp(scale * x)` of the V values at `base`, lane by lane and then across."""
    columns = tl.arange(0, BLOCK)
    running = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(base + start + columns, mask=start + columns < V, other=float("-inf")).to(tl.float32) * scale
        highest = tl.maximum(running, x)
        pivot = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(running - pivot) + tl.exp(x - pivot)
        running = highest
    top = tl.max(running, axis=0)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    return tl.log(tl.sum(total * tl.exp(running - pivot), axis=0)) + pivot


@triton.jit
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
    running = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    guess = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, V, BLOCK):
        x = tl.load(base + start + columns, mask=start + columns < V, other=float("-inf")).to(tl.float32)
        larger = x > running
        highest = tl.where(larger, x, running)
        pivot = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(running - pivot) + tl.exp(x - pivot)
        guess = tl.where(larger, start + columns, guess)
        running = highest
    top = tl.max(running, axis=0)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    tl.store(lse_ptr + row, tl.log(tl.sum(total * tl.exp(running - pivot), axis=0)) + pivot)
    tl.store(best_ptr + row, tl.min(tl.where(running == top, guess, V), axis=0).to(tl.int64))
    tl.store(target_logit_ptr + row, tl.load(base + tl.load(targets_ptr + row)).to(tl.float32))
