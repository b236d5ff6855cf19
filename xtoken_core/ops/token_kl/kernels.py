"""The Triton kernels of `token_kl`: a program per position forward, one per tile of a student row backward.

A sum of exponentials is kept by lane, as the largest logit so far and the sum of `exp(logit - largest)`.
"""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def raise_pivot(top, z):
    """Return the largest logits so far of lanes, pivots for their exponentials, and the factor of older sums."""
    highest = tl.maximum(top, z)
    pivot = tl.where(highest == float("-inf"), 0.0, highest)
    return highest, pivot, tl.exp(top - pivot)


@triton.jit
def over_lanes(top, total):
    """Return a row's `log sum exp`, and its pivot, from those of lanes."""
    highest = tl.max(top, axis=0)
    pivot = tl.where(highest == float("-inf"), 0.0, highest)
    return tl.log(tl.sum(total * tl.exp(top - pivot), axis=0)) + pivot, pivot


@triton.jit
def first_of(top, at):
    """Return the lowest id of a row's largest logit from those of lanes."""
    return tl.min(tl.where(top == tl.max(top, axis=0), at, 2147483647), axis=0)


@triton.jit
def weighted_gap(e, a, b):
    """Return `e (a - b)`, 0 where `e` is."""
    return tl.where(e > 0.0, e * (tl.where(e > 0.0, a, 0.0) - b), 0.0)


@triton.jit
def store_tokens(
    base,
    row,
    targets_ptr,
    top,
    total,
    at,
    V,
    V_head,
    losses_ptr,
    hits_ptr,
    head_lse_ptr,
    UNSCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store a row's cross-entropy on the whole head; sums over its first `V` logits are known at temperature 1."""
    lanes = tl.arange(0, BLOCK)
    first = V
    if not UNSCALED:
        first = 0
        top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        at = tl.zeros((BLOCK,), dtype=tl.int32)
    for begin in range(first, V_head, BLOCK):
        x = begin + lanes
        z = tl.load(base + x, mask=x < V_head, other=float("-inf")).to(tl.float32)
        at = tl.where(z > top, x, at)
        top, pivot, shrink = raise_pivot(top, z)
        total = total * shrink + tl.exp(z - pivot)
    lse, _ = over_lanes(top, total)
    target = tl.load(targets_ptr + row)
    tl.store(head_lse_ptr + row, lse)
    tl.store(losses_ptr + row, lse - tl.load(base + target).to(tl.float32))
    tl.store(hits_ptr + row, first_of(top, at) == target)


@triton.jit(do_not_specialize=["T"])
def token_kl_kernel(
    student_ptr,
    teacher_ptr,
    targets_ptr,
    kl_ptr,
    agrees_ptr,
    losses_ptr,
    hits_ptr,
    s_lse_ptr,
    t_lse_ptr,
    head_lse_ptr,
    T,
    V,
    V_head,
    s_stride_b,
    s_stride_t,
    t_stride_b,
    t_stride_t,
    scale,
    REVERSE: tl.constexpr,
    UNSCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one position, each side's row in one reading.

    With `p = softmax(z_t)`, the sum of `p (log p - log q)` is that of `p (z_t - z_s)`, plus the student's `log sum exp`
    less the teacher's.
    """
    row = tl.program_id(0).to(tl.int64)
    s_base = student_ptr + row // T * s_stride_b + row % T * s_stride_t
    t_base = teacher_ptr + row // T * t_stride_b + row % T * t_stride_t
    lanes = tl.arange(0, BLOCK)
    s_top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    t_top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    s_total = tl.zeros((BLOCK,), dtype=tl.float32)
    t_total = tl.zeros((BLOCK,), dtype=tl.float32)
    gap = tl.zeros((BLOCK,), dtype=tl.float32)
    s_at = tl.zeros((BLOCK,), dtype=tl.int32)
    t_at = tl.zeros((BLOCK,), dtype=tl.int32)
    for begin in range(0, V, BLOCK):
        x = begin + lanes
        s = tl.load(s_base + x, mask=x < V, other=float("-inf")).to(tl.float32) * scale  # [BLOCK]
        t = tl.load(t_base + x, mask=x < V, other=float("-inf")).to(tl.float32) * scale
        # `>`: a lane keeps the first of equal ones.
        s_at, t_at = tl.where(s > s_top, x, s_at), tl.where(t > t_top, x, t_at)
        s_top, s_pivot, s_shrink = raise_pivot(s_top, s)
        t_top, t_pivot, t_shrink = raise_pivot(t_top, t)
        s_e, t_e = tl.exp(s - s_pivot), tl.exp(t - t_pivot)
        s_total, t_total = s_total * s_shrink + s_e, t_total * t_shrink + t_e
        # The sum that p (or q, reversed) weighs is rescaled with that side's pivot, as the sum of its exponentials.
        gap = gap * s_shrink + weighted_gap(s_e, s, t) if REVERSE else gap * t_shrink + weighted_gap(t_e, t, s)
    s_lse, s_pivot = over_lanes(s_top, s_total)
    t_lse, t_pivot = over_lanes(t_top, t_total)
    if REVERSE:
        # exp(lse - pivot) is the sum of exponentials at the row's pivot: gap / sum is the expectation.
        kl = tl.sum(gap * tl.exp(s_top - s_pivot), axis=0) / tl.exp(s_lse - s_pivot) + t_lse - s_lse
    else:
        kl = tl.sum(gap * tl.exp(t_top - t_pivot), axis=0) / tl.exp(t_lse - t_pivot) + s_lse - t_lse
    tl.store(kl_ptr + row, kl)
    tl.store(agrees_ptr + row, first_of(s_top, s_at) == first_of(t_top, t_at))
    tl.store(s_lse_ptr + row, s_lse)
    tl.store(t_lse_ptr + row, t_lse)
    store_tokens(
        s_base, row, targets_ptr, s_top, s_total, s_at, V, V_head, losses_ptr, hits_ptr, head_lse_ptr, UNSCALED, BLOCK
    )


@triton.jit(do_not_specialize=["T"])
def token_kl_bwd_kernel(
    student_ptr,
    teacher_ptr,
    targets_ptr,
    kl_ptr,
    s_lse_ptr,
    t_lse_ptr,
    head_lse_ptr,
    of_kl_ptr,
    of_losses_ptr,
    grad_ptr,
    T,
    V,
    V_head,
    s_stride_b,
    s_stride_t,
    t_stride_b,
    t_stride_t,
    scale,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one tile of a student row's gradient; a part without upstream gradient reads nothing."""
    row = tl.program_id(0).to(tl.int64)
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    s_base = student_ptr + row // T * s_stride_b + row % T * s_stride_t
    t_base = teacher_ptr + row // T * t_stride_b + row % T * t_stride_t
    of_kl, of_loss = tl.load(of_kl_ptr + row) * scale, tl.load(of_losses_ptr + row)
    gradient = tl.zeros((BLOCK,), dtype=tl.float32)
    if (of_kl != 0.0) | (of_loss != 0.0):
        z = tl.load(s_base + x, mask=x < V_head, other=float("-inf")).to(tl.float32)
        if of_kl != 0.0:
            t = tl.load(t_base + x, mask=x < V, other=float("-inf")).to(tl.float32)
            log_q, log_p = z * scale - tl.load(s_lse_ptr + row), t * scale - tl.load(t_lse_ptr + row)
            q = tl.exp(log_q)
            # d KL(p || q) / dz = q - p; reversed, of sum q (log q - log p), q (log q - log p - kl).
            slope = weighted_gap(q, log_q - tl.load(kl_ptr + row), log_p) if REVERSE else q - tl.exp(log_p)
            gradient += tl.where(x < V, slope * of_kl, 0.0)
        if of_loss != 0.0:
            own = (x == tl.load(targets_ptr + row)).to(tl.float32)
            gradient += (tl.exp(z - tl.load(head_lse_ptr + row)) - own) * of_loss
    tl.store(grad_ptr + row * V_head + x, gradient.to(grad_ptr.dtype.element_ty), mask=x < V_head)
