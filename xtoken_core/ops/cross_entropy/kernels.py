"""The Triton kernels of `cross_entropy`: a row's values, with its gradient where the upstream gradient is known."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

LOWEST = tl.constexpr(-3.0e38)
"""Below every logit but -inf, from which it can be subtracted."""


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


@triton.jit
def store_row_gradient(base, to_ptr, lse, target, upstream, V, BLOCK: tl.constexpr):
    """Store `(softmax - onehot) * upstream`; a row without upstream gradient is not read. The two may be one row."""
    blocks = tl.cdiv(V, BLOCK)
    # From the end: what the row's sum has read last is the nearest.
    for block in range(blocks):
        columns = (blocks - 1 - block) * BLOCK + tl.arange(0, BLOCK)
        mask = columns < V
        # Padding and masked positions: zeros.
        gradient = tl.zeros((BLOCK,), dtype=tl.float32)
        if upstream != 0.0:
            x = tl.load(base + columns, mask=mask, other=float("-inf")).to(tl.float32)
            gradient = (tl.exp(x - lse) - (columns == target).to(tl.float32)) * upstream
        tl.store(to_ptr + columns, gradient.to(to_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["R", "T"])
def cross_entropy_kernel(
    logits_ptr,
    matrix,
    targets_ptr,
    upstream_ptr,
    lse_ptr,
    losses_ptr,
    hits_ptr,
    grad_ptr,
    R,
    T,
    V,
    stride_b,
    stride_t,
    GRADIENT: tl.constexpr,
    STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute rows' `log sum exp x`, losses and hits, and with GRADIENT their gradients from a second reading.

    So few programs run at once that the cache holds their rows until then. With STAGES rows are read by TMA, from
    `matrix`: all logits in rows of WIDTH (`row_matrix`).
    """
    for row in range(tl.program_id(0).to(tl.int64), R, tl.num_programs(0)):
        offset = row // T * stride_b + row % T * stride_t
        base = logits_ptr + offset
        target = tl.load(targets_ptr + row)
        own = tl.load(base + target).to(tl.float32)
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
        tl.store(losses_ptr + row, lse - own)
        tl.store(hits_ptr + row, tl.min(tl.where(running == top, guess, V), axis=0) == target)  # lowest id of a tie
        if GRADIENT:
            store_row_gradient(base, grad_ptr + row * V, lse, target, tl.load(upstream_ptr + row), V, BLOCK)


@triton.jit(do_not_specialize=["T"])
def cross_entropy_bwd_kernel(
    logits_ptr, targets_ptr, lse_ptr, upstream_ptr, grad_ptr, T, V, stride_b, stride_t, BLOCK: tl.constexpr
):
    """Compute the gradient of one block of one row; a row without upstream gradient is not read."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    base = logits_ptr + row // T * stride_b + row % T * stride_t + start
    target, upstream = tl.load(targets_ptr + row) - start, tl.load(upstream_ptr + row)
    to_ptr = grad_ptr + row * V + start
    store_row_gradient(base, to_ptr, tl.load(lse_ptr + row), target, upstream, tl.minimum(V - start, BLOCK), BLOCK)
