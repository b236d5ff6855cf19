"""The Triton kernel that reads a chunk's first rows on both sides at once: the teacher's logits are in class order.

Neither side's `log sum exp` is known while rows are read. A lane keeps its teacher's sums, and what is added up of the
divergence, `w (z_t - z_s)` with `w = exp(z_t - pivot)`, by one pivot.
"""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.chain.start_kernels import (
    ADJACENT,
    FEW_LIVE,
    LOG_TINY,
    bits_of,
    columns_of,
    exact_plain,
    exp,
    finite,
    live_log_sum,
    live_of,
    live_words,
    raised,
    row_of,
    row_sum,
    store_cross_entropy,
    sum_over_lanes,
)


@triton.jit
def live_log(base, bits, V, scale, highest, alive, LANES: tl.constexpr):
    """Return `log sum exp` of a row's live logits from the sum over all lanes, or by a pivot of its own."""
    lse = tl.log(alive) + highest
    if alive < FEW_LIVE:
        lse = live_log_sum(base, bits, V, scale, LANES)
    return lse


@triton.jit
def store_sums(row, highest, whole, top_ptr, total_ptr):
    """Store the pair of a row."""
    tl.store(top_ptr + row, highest)
    tl.store(total_ptr + row, whole)


@triton.jit
def rest_of_teacher(base, bits, first, V, scale, top, total, alive, LANES: tl.constexpr):
    """Add the teacher's columns behind the student's last one to the sums of lanes."""
    for begin in range(first // (LANES * ADJACENT) * (LANES * ADJACENT), V, LANES * ADJACENT):
        x = columns_of(begin, LANES)
        z = tl.load(base + x, mask=x < V, other=float("-inf")).to(tl.float32) * scale
        z = tl.where(x >= first, z, float("-inf"))
        live = live_of(bits, begin, x, V, LANES)
        top, pivot, shrink = raised(top, z)
        e = exp(z - pivot[:, None])
        total = total * shrink + tl.sum(e, axis=1)
        alive = alive * shrink + tl.sum(tl.where(live, e, 0.0), axis=1)
    return top, total, alive


@triton.jit
def sums_of_both(base, t_base, bits, t_bits, t_own, V, scale, LANES: tl.constexpr):
    """Return the sums of lanes over the columns that both sides have.

    Returns:
        The student's largest logits, whole and live sums; the teacher's; the KL over plain classes and their mass, by
        the teacher's pivots; and the student's lowest logits among these.
    """
    top = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((LANES,), dtype=tl.float32)
    t_top = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    alive = tl.zeros((LANES,), dtype=tl.float32)
    t_total = tl.zeros((LANES,), dtype=tl.float32)
    t_alive = tl.zeros((LANES,), dtype=tl.float32)
    kl = tl.zeros((LANES,), dtype=tl.float32)
    mass = tl.zeros((LANES,), dtype=tl.float32)
    lowest = tl.full((LANES,), float("inf"), dtype=tl.float32)
    for begin in range(0, V, LANES * ADJACENT):
        x = columns_of(begin, LANES)
        z = tl.load(base + x, mask=x < V, other=float("-inf")).to(tl.float32) * scale
        y = tl.load(t_base + x, mask=x < V, other=float("-inf")).to(tl.float32) * scale
        word = live_words(bits, begin, V, LANES)
        live = bits_of(word, x, V)
        both = bits_of(word & live_words(t_bits, begin, V, LANES), x, V)
        # Online softmax: where a tile has a larger logit, the sums so far are rescaled to the new pivot. Sums over the
        # teacher's probabilities, the KL's among them, have the teacher's pivot.
        top, pivot, shrink = raised(top, z)
        e = exp(z - pivot[:, None])
        total = total * shrink + tl.sum(e, axis=1)
        alive = alive * shrink + tl.sum(tl.where(live, e, 0.0), axis=1)
        t_top, pivot, shrink = raised(t_top, y)
        e = exp(y - pivot[:, None])
        t_total = t_total * shrink + tl.sum(e, axis=1)
        t_alive = t_alive * shrink + tl.sum(tl.where(live_of(t_own, begin, x, V, LANES), e, 0.0), axis=1)
        e = tl.where(both, e, 0.0)
        kl = kl * shrink + tl.sum(tl.where(e > 0.0, e * (y - z), 0.0), axis=1)
        mass = mass * shrink + tl.sum(e, axis=1)
        lowest = tl.minimum(lowest, tl.min(tl.where(e > 0.0, z, float("inf")), axis=1))
    return top, total, alive, t_top, t_total, t_alive, kl, mass, lowest


@triton.jit
def sums_of_student(base, V, scale, LANES: tl.constexpr):
    """Return the largest logits of lanes and their sums."""
    top = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((LANES,), dtype=tl.float32)
    for begin in range(0, V, LANES * ADJACENT):
        x = columns_of(begin, LANES)
        z = tl.load(base + x, mask=x < V, other=float("-inf")).to(tl.float32) * scale
        top, pivot, shrink = raised(top, z)
        total = total * shrink + tl.sum(exp(z - pivot[:, None]), axis=1)
    return top, total


@triton.jit(do_not_specialize=["E", "T_s", "T_t"], do_not_specialize_on_alignment=["targets_ptr"])
def chain_both_kernel(
    student_ptr,
    teacher_ptr,
    targets_ptr,
    event_ptr,
    teacher_row_ptr,
    s_bits_ptr,
    t_own_ptr,
    t_bits_ptr,
    losses_ptr,
    hits_ptr,
    head_lse_ptr,
    top_ptr,
    total_ptr,
    t_top_ptr,
    t_total_ptr,
    s_lse_ptr,
    t_lse_ptr,
    terms_ptr,
    E,
    T_s,
    T_t,
    V_head,
    V,
    V_t,
    W,
    W_t,
    s_stride_b,
    s_stride_t,
    t_stride_b,
    t_stride_t,
    scale,
    TARGETS: tl.constexpr,
    UNSCALED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Compute one student row, and where a chunk starts its teacher's row and the KL over plain classes."""
    row = tl.program_id(0)
    base = row_of(student_ptr, row, T_s, s_stride_b, s_stride_t)
    event = tl.load(event_ptr + row)
    at = tl.maximum(event, 0)
    t_row = tl.load(teacher_row_ptr + at)
    t_base = row_of(teacher_ptr, t_row, T_t, t_stride_b, t_stride_t)
    bits, t_bits = s_bits_ptr + at.to(tl.int64) * W, t_bits_ptr + at.to(tl.int64) * W
    t_own = t_own_ptr + at.to(tl.int64) * W_t
    top = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((LANES,), dtype=tl.float32)
    if event >= 0:
        top, total, alive, t_top, t_total, t_alive, kl, mass, lowest = sums_of_both(
            base, t_base, bits, t_bits, t_own, V, scale, LANES
        )
        before = t_top
        t_top, t_total, t_alive = rest_of_teacher(t_base, t_own, V, V_t, scale, t_top, t_total, t_alive, LANES)
        highest, whole = sum_over_lanes(t_top, t_total)
        store_sums(t_row, highest, whole, t_top_ptr, t_total_ptr)
        part = tl.sum(t_alive * exp(t_top - highest), axis=0)
        t_lse = live_log(t_base, t_own, V_t, scale, highest, part, LANES)
        factor = exp(finite(before) - t_lse)
        of_plain = tl.sum(mass * factor, axis=0)
        value = tl.sum(kl * factor, axis=0) - t_lse * of_plain
        highest, whole = sum_over_lanes(top, total)
        s_lse = live_log(base, bits, V, scale, highest, tl.sum(alive * exp(top - highest), axis=0), LANES)
        value += s_lse * of_plain
        unclipped = of_plain
        if (tl.min(lowest, axis=0) - s_lse < LOG_TINY) | (part < FEW_LIVE):
            value, of_plain, unclipped = exact_plain(
                base, t_base, t_bits, bits, t_bits, V, scale, s_lse, t_lse, True, LANES
            )
        tl.store(s_lse_ptr + event, s_lse)
        tl.store(t_lse_ptr + event, t_lse)
        tl.store(terms_ptr + event, value)
        tl.store(terms_ptr + E + event, of_plain)
        tl.store(terms_ptr + 2 * E + event, unclipped)
        store_sums(row, highest, whole, top_ptr, total_ptr)
    else:
        top, total = sums_of_student(base, V, scale, LANES)
        highest, whole = sum_over_lanes(top, total)
        store_sums(row, highest, whole, top_ptr, total_ptr)
    if TARGETS:
        target = tl.load(targets_ptr + row)
        first = V
        if not UNSCALED:
            first = 0
            top = tl.full((LANES,), float("-inf"), dtype=tl.float32)
            total = tl.zeros((LANES,), dtype=tl.float32)
        top, total = row_sum(base, first, V_head, top, total, LANES)
        store_cross_entropy(base, row, target, top, total, losses_ptr, hits_ptr, head_lse_ptr, LANES)
