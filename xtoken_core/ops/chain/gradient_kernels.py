"""The Triton kernel of a student row's gradient: cross-entropy, the start of its chunk, and a node that reads it."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.chain.start_kernels import ADJACENT, LOG_TINY, columns_of, exp, in_64_bits, live_of, row_of


@triton.jit
def part_of_loss(x, z, row, targets_ptr, of_losses_ptr, head_lse_ptr, TARGETS: tl.constexpr):
    """Return the gradient of a row's cross-entropy."""
    gradient = tl.zeros(z.shape, dtype=tl.float32)
    if TARGETS:
        of_loss = tl.load(of_losses_ptr + row)
        if of_loss != 0.0:
            hit = (x == tl.load(targets_ptr + row)).to(tl.float32)
            gradient = (exp(z - tl.load(head_lse_ptr + row)) - hit) * of_loss
    return gradient


@triton.jit
def weight_of(event, chunk, at_end_ptr, of_parts_ptr, E, known):
    """Return the upstream gradient of a node: that of its chunk's inner part or end."""
    at_end = tl.load(at_end_ptr + event, mask=known, other=0).to(tl.int64)
    return tl.load(of_parts_ptr + (1 + at_end) * E + chunk, mask=known, other=0.0)


@triton.jit
def part_of_node(
    x, z, row, of_parts_ptr, chunk_ptr, at_end_ptr, E, level_ptr, reads, top_ptr, total_ptr, V, scale
):  # fmt: skip
    """Return the gradient of the node that reads a row, as if the node named none of the classes."""
    gradient = tl.zeros(z.shape, dtype=tl.float32)
    chunk = tl.load(chunk_ptr + row - 1, mask=(row > 0) & (row - 1 < reads), other=-1)  # the node before a position
    if chunk >= 0:
        factor = (
            weight_of(row - 1, chunk, at_end_ptr, of_parts_ptr, E, chunk >= 0)
            * tl.load(level_ptr + row - 1)
            * scale
            / tl.load(total_ptr + row)
        )
        if factor != 0.0:
            gradient = tl.where(x < V, exp(z * scale - tl.load(top_ptr + row)) * factor, 0.0)
    return gradient


@triton.jit
def part_of_start(
    x, z, live, t_live, event,
    of_start_ptr, teacher_ptr, teacher_row_ptr, partner_ptr, ratio_ptr, mass_ptr,
    s_lse_ptr, t_lse_ptr, T_t, V, M, t_stride_b, t_stride_t, scale
):  # fmt: skip
    """Return the gradient of the start of a row's chunk."""
    gradient = tl.zeros(z.shape, dtype=tl.float32)
    of_start = tl.load(of_start_ptr + event, mask=event >= 0, other=0.0)
    if of_start != 0.0:
        t_base = row_of(teacher_ptr, tl.load(teacher_row_ptr + event), T_t, t_stride_b, t_stride_t)
        y = tl.load(partner_ptr + x, mask=x < V, other=0)  # all of them: wide loads
        log_q = z * scale - tl.load(s_lse_ptr + event)
        q = tl.where(live, exp(log_q), 0.0)
        both = live & t_live & (log_q >= LOG_TINY)
        log_p = tl.load(t_base + y, mask=both, other=float("-inf")).to(tl.float32) * scale
        p = exp(log_p - tl.load(t_lse_ptr + event))
        ratio = tl.load(ratio_ptr + in_64_bits(event) * M - 1 - y, mask=live & (y < 0), other=0.0).to(tl.float32)
        gradient = of_start * scale * (q * (tl.load(mass_ptr + event) - ratio) - p)
    return gradient


@triton.jit
def gradient_at(
    x, there, live, t_live, row, student_ptr, teacher_ptr, targets_ptr, event_ptr, teacher_row_ptr, partner_ptr,
    ratio_ptr, head_lse_ptr, top_ptr, total_ptr, mass_ptr, s_lse_ptr, t_lse_ptr, of_losses_ptr,
    of_start_ptr, node_chunk_ptr, node_end_ptr, E, level_ptr, reads, T_s, T_t, V, M,
    s_stride_b, s_stride_t, t_stride_b, t_stride_t, scale, TARGETS: tl.constexpr
):  # fmt: skip
    """Return the gradient of some of a row's logits in float32, all that is computed element by element."""
    base = row_of(student_ptr, row, T_s, s_stride_b, s_stride_t)
    z = tl.load(base + x, mask=there, other=float("-inf")).to(tl.float32)
    gradient = part_of_loss(x, z, row, targets_ptr, of_losses_ptr, head_lse_ptr, TARGETS)
    gradient += part_of_node(
        x, z, row, of_start_ptr, node_chunk_ptr, node_end_ptr, E, level_ptr, reads, top_ptr, total_ptr, V, scale
    )  # fmt: skip
    gradient += part_of_start(
        x, z, live, t_live, tl.load(event_ptr + row),
        of_start_ptr, teacher_ptr, teacher_row_ptr, partner_ptr,
        ratio_ptr, mass_ptr, s_lse_ptr, t_lse_ptr, T_t, V, M, t_stride_b, t_stride_t, scale
    )  # fmt: skip
    return gradient


@triton.jit
def chain_row_bwd_kernel(
    student_ptr, teacher_ptr, targets_ptr, event_ptr, teacher_row_ptr, s_bits_ptr, t_bits_ptr,
    partner_ptr, ratio_ptr, head_lse_ptr, top_ptr, total_ptr, mass_ptr, s_lse_ptr, t_lse_ptr, of_losses_ptr,
    of_start_ptr, node_chunk_ptr, node_end_ptr, E, level_ptr, reads, T_s, T_t, V, M, W,
    s_stride_b, s_stride_t, t_stride_b, t_stride_t, scale,
    grad_ptr, V_head, blocks, TARGETS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Store one block of a student row's gradient."""
    row = tl.program_id(0) // blocks
    begin = tl.program_id(0) % blocks * LANES * ADJACENT
    x = columns_of(begin, LANES)
    event = tl.load(event_ptr + row)
    own_bits = in_64_bits(tl.maximum(event, 0)) * W
    compared = tl.where(event >= 0, V, 0)
    live = live_of(s_bits_ptr + own_bits, begin, x, compared, LANES)
    t_live = live_of(t_bits_ptr + own_bits, begin, x, compared, LANES)
    gradient = gradient_at(
        x, x < V_head, live, t_live, row,
        student_ptr, teacher_ptr, targets_ptr, event_ptr, teacher_row_ptr,
        partner_ptr, ratio_ptr, head_lse_ptr, top_ptr, total_ptr, mass_ptr, s_lse_ptr, t_lse_ptr, of_losses_ptr,
        of_start_ptr, node_chunk_ptr, node_end_ptr, E, level_ptr, reads, T_s, T_t, V, M,
        s_stride_b, s_stride_t, t_stride_b, t_stride_t, scale, TARGETS
    )  # fmt: skip
    own = grad_ptr + in_64_bits(row) * V_head
    tl.store(own + x, gradient.to(grad_ptr.dtype.element_ty), mask=x < V_head)
