"""The Triton kernels of `token_kl`: values of a position, with the gradient where the upstream gradients are known."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.row_kernels import first_of, hand_over, handed_over, largest, over_parts


@triton.jit
def weighted_gap(e, a, b):
    """Return `e (a - b)`, 0 where `e` is."""
    return tl.where(e > 0.0, e * (tl.where(e > 0.0, a, 0.0) - b), 0.0)


@triton.jit(do_not_specialize=["T"])
def token_kl_kernel(
    student_ptr,
    teacher_ptr,
    targets_ptr,
    slots_ptr,
    kl_ptr,
    agrees_ptr,
    losses_ptr,
    hits_ptr,
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
    APART: tl.constexpr,
    GRADIENT: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one block of a position for its values, and with GRADIENT its gradient.

    Both sides' blocks stay in registers while the row's programs exchange their sums. With `p = softmax(z_t)`, the sum
    of `p (log p - log q)` is that of `p (z_t - z_s)`, plus the student's `log sum exp` less the teacher's. With APART
    the head's sums are not those of the comparison: it is wider, or the temperature is not 1.
    """
    number, programs = tl.program_id(0), tl.num_programs(0)
    row, part = (number // PARTS).to(tl.int64), number % PARTS
    x = part * BLOCK + tl.arange(0, BLOCK)
    s_base = student_ptr + row // T * s_stride_b + row % T * s_stride_t
    t_base = teacher_ptr + row // T * t_stride_b + row % T * t_stride_t
    z = tl.load(s_base + x, mask=x < V_head, other=float("-inf")).to(tl.float32)  # [BLOCK]
    t = tl.load(t_base + x, mask=x < V, other=float("-inf")).to(tl.float32) * scale
    s = tl.where(x < V, z, float("-inf")) * scale
    s_top, t_top = largest(s), largest(t)
    agrees = first_of(s, s_top, x) == first_of(t, t_top, x)
    top = largest(z) if APART else s_top
    target = tl.load(targets_ptr + row)
    holds = target // BLOCK == part
    own, first = 0.0, 0
    if holds:
        # This program alone overwrites it, later.
        own, first = tl.load(s_base + target).to(tl.float32), first_of(z, top, x)
    s_e, t_e = tl.exp(s - s_top), tl.exp(t - t_top)
    gap = tl.sum(weighted_gap(s_e, s, t) if REVERSE else weighted_gap(t_e, t, s), axis=0)
    hand_over(slots_ptr + number, s_top, tl.sum(s_e, axis=0))
    hand_over(slots_ptr + programs + number, t_top, tl.sum(t_e, axis=0))
    hand_over(slots_ptr + 2 * programs + number, gap, tl.full((), 1.0, tl.float32))  # not 0 together
    e = s_e
    if APART:
        e = tl.exp(z - top)
        hand_over(slots_ptr + 3 * programs + number, top, tl.sum(e, axis=0))

    slots_ptr += row * PARTS
    s_lse, s_total, s_factors, s_best = over_parts(slots_ptr, PARTS, SLOTS)
    t_lse, t_total, t_factors, t_best = over_parts(slots_ptr + programs, PARTS, SLOTS)
    gaps, _ = handed_over(slots_ptr + 2 * programs, PARTS, SLOTS)
    # What p (or q, reversed) weighs is rescaled as the sum of its exponentials; an infinite gap may weigh nothing.
    if REVERSE:
        kl = tl.sum(tl.where(s_factors > 0.0, gaps * s_factors, 0.0), axis=0) / s_total + t_lse - s_lse
    else:
        kl = tl.sum(tl.where(t_factors > 0.0, gaps * t_factors, 0.0), axis=0) / t_total + s_lse - t_lse
    lse, best = s_lse, s_best
    if APART:
        lse, _, _, best = over_parts(slots_ptr + 3 * programs, PARTS, SLOTS)
    if part == 0:
        tl.store(kl_ptr + row, kl)
        tl.store(s_lse_ptr + row, s_lse)
        tl.store(t_lse_ptr + row, t_lse)
        tl.store(head_lse_ptr + row, lse)
    if part == s_best:
        tl.store(agrees_ptr + row, agrees & (t_best == part))  # the lowest id of a tie
    if holds:
        tl.store(losses_ptr + row, lse - own)
        tl.store(hits_ptr + row, (best == part) & (first == target))
    if GRADIENT:
        of_kl, of_loss = tl.load(of_kl_ptr + row) * scale, tl.load(of_losses_ptr + row)
        gradient = tl.zeros((BLOCK,), dtype=tl.float32)
        # d KL(p || q) / dz = q - p; reversed, of sum q (log q - log p), q (log q - log p - kl).
        if of_kl != 0.0:
            q = s_e * tl.exp(s_top - s_lse)
            slope = weighted_gap(q, s - s_lse - kl, t - t_lse) if REVERSE else q - t_e * tl.exp(t_top - t_lse)
            gradient += tl.where(x < V, slope * of_kl, 0.0)
        if of_loss != 0.0:
            gradient += (e * tl.exp(top - lse) - (x == target).to(tl.float32)) * of_loss
        tl.store(grad_ptr + row * V_head + x, gradient.to(grad_ptr.dtype.element_ty), mask=x < V_head)


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
