"""The Triton kernel of a student row's gradient: cross-entropy, the start of its chunk, and a node that reads it.

That of a start's generalised JSD reads the same.
"""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.chain.form_kernels import LOG_TINY, mixture_term, odds_of, ratio_of
from xtoken_core.ops.chain.start_kernels import (
    ADJACENT,
    LOG2_E,
    bits_of,
    columns_of,
    exp,
    in_64_bits,
    live_of,
    live_words,
    row_of,
)


@triton.jit
def weight_of(event, chunk, at_end_ptr, of_parts_ptr, E, known):
    """Return the upstream gradient of a node: that of its chunk's inner part or end."""
    # Upstream gradients are `[3, E]`: start, inner, end.
    at_end = tl.load(at_end_ptr + event, mask=known, other=0).to(tl.int64)
    return tl.load(of_parts_ptr + (1 + at_end) * E + chunk, mask=known, other=0.0)


@triton.jit
def loss_of_row(row, targets_ptr, of_losses_ptr, head_lse_ptr, TARGETS: tl.constexpr):
    """Return the upstream gradient of a row's cross-entropy, its target and its `log sum exp`; 0 without targets."""
    of_loss, target, head_lse = 0.0, -1, 0.0
    if TARGETS:
        of_loss = tl.load(of_losses_ptr + row)
        target = tl.load(targets_ptr + row).to(tl.int32)
        head_lse = tl.load(head_lse_ptr + row)
    return of_loss, target, head_lse


@triton.jit
def node_of_row(row, of_parts_ptr, chunk_ptr, at_end_ptr, E, level_ptr, reads, top_ptr, total_ptr, scale):
    """Return the factor of the node that reads a row, as if it named no class, and the row's largest logit."""
    chunk = tl.load(chunk_ptr + row - 1, mask=(row > 0) & (row - 1 < reads), other=-1)  # the node before a position
    weight = weight_of(row - 1, chunk, at_end_ptr, of_parts_ptr, E, chunk >= 0)
    level = tl.load(level_ptr + row - 1, mask=chunk >= 0, other=0.0)
    # q (mass - P / Q): q = exp(z - top) / total; `level` is the mass less the ratio of classes that are not named.
    factor = tl.where(chunk >= 0, weight * level * scale / tl.load(total_ptr + row), 0.0)
    return factor, tl.load(top_ptr + row)


@triton.jit
def part_of_loss(x, z, of_loss, target, head_lse, TARGET: tl.constexpr = True):
    """Return the gradient of a row's cross-entropy; `TARGET`: with the target's own term."""
    gradient = tl.zeros(z.shape, dtype=tl.float32)
    if of_loss != 0.0:
        gradient = exp(z - head_lse) * of_loss
        if TARGET:
            gradient = gradient - tl.where(x == target, of_loss, 0.0)
    return gradient


@triton.jit
def part_of_node(x, z, factor, top, V, scale):
    """Return the gradient of the node that reads a row, as if the node named none of the classes."""
    gradient = tl.zeros(z.shape, dtype=tl.float32)
    if factor != 0.0:
        gradient = tl.where(x < V, exp(z * scale - top) * factor, 0.0)
    return gradient


@triton.jit
def part_of_both(x, z, of_loss, target, head_lse, factor, top, V, TARGET: tl.constexpr = True):
    """Return the gradient of a row's cross-entropy and of the node that reads it, at temperature 1: one exponential.

    `TARGET`: with the target's own term.
    """
    gradient = tl.zeros(z.shape, dtype=tl.float32)
    if (of_loss != 0.0) | (factor != 0.0):
        # Both are multiples of exp(z): softmax * of_loss and exp(z - top) * factor, the second one for z < V alone.
        inside = of_loss + factor * exp(head_lse - top)
        gradient = tl.exp2(z * LOG2_E - head_lse * LOG2_E) * tl.where(x < V, inside, of_loss)
        if TARGET:
            gradient = gradient - tl.where(x == target, of_loss, 0.0)
    return gradient


@triton.jit
def start_of_row(event, of_start_ptr, teacher_ptr, teacher_row_ptr, sums, strides, E, FORM: tl.constexpr):
    """Return the start at a row: upstream gradient, 0 = none, teacher's row, mass, both live sums, and the slope."""
    mass_ptr, s_lse_ptr, t_lse_ptr, slope_ptr = sums
    T_t, t_stride_b, t_stride_t = strides
    there, at = event >= 0, tl.maximum(event, 0)
    of_start = tl.load(of_start_ptr + at, mask=there, other=0.0)
    t_base = row_of(teacher_ptr, tl.load(teacher_row_ptr + at), T_t, t_stride_b, t_stride_t)
    mass = tl.load(mass_ptr + at, mask=there, other=0.0)
    s_lse = tl.load(s_lse_ptr + at, mask=there, other=0.0)
    shift, slope = 0.0, -1.0
    if FORM != 0.0:
        shift = tl.load(slope_ptr + at, mask=there, other=0.0)
        slope = tl.load(slope_ptr + E + at, mask=there, other=-1.0)
    return of_start, t_base, mass, s_lse, tl.load(t_lse_ptr + at, mask=there, other=0.0), shift, slope


@triton.jit
def gap_of(log_q, y, both, log_p, stored):
    """Return `log(p / q)` of tokens' classes at a start in generated text; -inf of a class that is not compared.

    That of plain classes is computed from logarithms of base 2.
    """
    gap = (tl.maximum(log_p, LOG_TINY * LOG2_E) - log_q) * (1.0 / LOG2_E)
    return tl.where(y < 0, stored, tl.where(both, gap, float("-inf")))


@triton.jit
def part_of_start(x, z, live, both, of_start, t_base, mass, s_lse, t_lse, shift, slope, classes, FORM: tl.constexpr):
    """Return the gradient of the start of a row's chunk."""
    partner_ptr, ratios_ptr, V, scale = classes
    gradient = tl.zeros(z.shape, dtype=tl.float32)
    if of_start != 0.0:
        y = tl.load(partner_ptr + x, mask=x < V, other=0)  # all of them: wide loads
        # d KL / d z_x = q_x (mass - P_c / Q_c) for a token x of class c; in a plain class q_x P_c / Q_c is p itself,
        # and of no plain class a ratio is stored (docs/losses.md, `Definition`; mass counts classes above the floor).
        log_q = z * (scale * LOG2_E) - s_lse * LOG2_E
        q = tl.where(live, tl.exp2(log_q), 0.0)
        both = both & (log_q >= LOG_TINY * LOG2_E)  # below the floor the term is constant
        log_p = tl.load(t_base + y, mask=both, other=float("-inf")).to(tl.float32) * (scale * LOG2_E)
        p = tl.exp2(log_p - t_lse * LOG2_E)
        ratio = tl.load(ratios_ptr - 1 - y, mask=live & (y < 0), other=0.0).to(tl.float32)
        if FORM != 0.0:
            gap = gap_of(log_q, y, both, log_p - t_lse * LOG2_E, ratio)
            generated = slope >= 0.0  # -1 in given text
            ratio = tl.where(generated, ratio_of(gap, shift, slope, FORM), ratio)
            p = tl.where(generated, 0.0, p)
        gradient = of_start * scale * (q * (mass - ratio) - p)
    return gradient


@triton.jit
def parts_of_row(row, event, tokens, sums, upstream, nodes, strides, scale, TARGETS: tl.constexpr, FORM: tl.constexpr):
    """Return the values that all logits of a row share: of its loss, of the node that reads it, and of its start."""
    teacher_ptr, targets_ptr, teacher_row_ptr = tokens
    head_lse_ptr, top_ptr, total_ptr, mass_ptr, s_lse_ptr, t_lse_ptr, slope_ptr = sums
    of_losses_ptr, of_start_ptr = upstream
    node_chunk_ptr, node_end_ptr, E, level_ptr, reads = nodes
    of_loss, target, head_lse = loss_of_row(row, targets_ptr, of_losses_ptr, head_lse_ptr, TARGETS)
    factor, top = node_of_row(
        row, of_start_ptr, node_chunk_ptr, node_end_ptr, E, level_ptr, reads, top_ptr, total_ptr, scale
    )
    of_start, t_base, mass, s_lse, t_lse, shift, slope = start_of_row(
        event, of_start_ptr, teacher_ptr, teacher_row_ptr, (mass_ptr, s_lse_ptr, t_lse_ptr, slope_ptr), strides, E, FORM
    )
    return of_loss, target, head_lse, factor, top, of_start, t_base, mass, s_lse, t_lse, shift, slope


@triton.jit
def gradient_at(
    x,
    there,
    live,
    both,
    base,
    parts,
    classes,
    TARGETS: tl.constexpr,
    UNSCALED: tl.constexpr,
    FORM: tl.constexpr,
    TARGET: tl.constexpr = True,
):
    """Return the gradient of some of a row's logits in float32, all that is computed element by element.

    `parts` are from `parts_of_row`; `classes` are partners, the start's ratios, V and the scale. `TARGET`: with the
    target's own term.
    """
    of_loss, target, head_lse, factor, top, of_start, t_base, mass, s_lse, t_lse, shift, slope = parts
    V, scale = classes[2], classes[3]
    z = tl.load(base + x, mask=there, other=float("-inf")).to(tl.float32)
    gradient = part_of_start(x, z, live, both, of_start, t_base, mass, s_lse, t_lse, shift, slope, classes, FORM)
    if TARGETS and UNSCALED:
        gradient += part_of_both(x, z, of_loss, target, head_lse, factor, top, V, TARGET)
    else:
        gradient += part_of_node(x, z, factor, top, V, scale)
        if TARGETS:
            gradient += part_of_loss(x, z, of_loss, target, head_lse, TARGET)
    return gradient


@triton.jit(do_not_specialize=["E", "reads", "T_s", "T_t", "first_row"], do_not_specialize_on_alignment=["targets_ptr"])
def chain_row_bwd_kernel(
    student_ptr,
    teacher_ptr,
    targets_ptr,
    event_ptr,
    teacher_row_ptr,
    s_bits_ptr,
    t_bits_ptr,
    partner_ptr,
    ratio_ptr,
    head_lse_ptr,
    top_ptr,
    total_ptr,
    mass_ptr,
    s_lse_ptr,
    t_lse_ptr,
    slope_ptr,
    of_losses_ptr,
    of_start_ptr,
    node_chunk_ptr,
    node_end_ptr,
    E,
    level_ptr,
    reads,
    T_s,
    T_t,
    V,
    M,
    W,
    s_stride_b,
    s_stride_t,
    t_stride_b,
    t_stride_t,
    scale,
    grad_ptr,
    V_head,
    stored_ptr,
    W_head,
    first_row,
    blocks,
    TARGETS: tl.constexpr,
    UNSCALED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Store some adjacent tiles of a student row's gradient; over its logits, what is stored there already stays."""
    row = first_row + tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * (TILES * LANES * ADJACENT)
    event = tl.load(event_ptr + row)
    base = row_of(student_ptr, row, T_s, s_stride_b, s_stride_t)
    own = in_64_bits(tl.maximum(event, 0))
    parts = parts_of_row(
        row,
        event,
        (teacher_ptr, targets_ptr, teacher_row_ptr),
        (head_lse_ptr, top_ptr, total_ptr, mass_ptr, s_lse_ptr, t_lse_ptr, slope_ptr),
        (of_losses_ptr, of_start_ptr),
        (node_chunk_ptr, node_end_ptr, E, level_ptr, reads),
        (T_t, t_stride_b, t_stride_t),
        scale,
        TARGETS,
        FORM,
    )
    classes = partner_ptr, ratio_ptr + own * M, V, scale
    # The target's own term is subtracted in one tile only, outside `gradient_at`: no comparison for the other tiles.
    of_loss, target, _ = loss_of_row(row, targets_ptr, of_losses_ptr, head_lse_ptr, TARGETS)
    compared = tl.where(event >= 0, V, 0)
    for begin in range(first, tl.minimum(first + TILES * LANES * ADJACENT, V_head), LANES * ADJACENT):
        x = columns_of(begin, LANES)
        word = live_words(s_bits_ptr + own * W, begin, compared, LANES)
        live = bits_of(word, x, compared)
        both = bits_of(word & live_words(t_bits_ptr + own * W, begin, compared, LANES), x, compared)
        gradient = gradient_at(x, x < V_head, live, both, base, parts, classes, TARGETS, UNSCALED, FORM, False)
        if (target >= begin) & (target < begin + LANES * ADJACENT):  # -1 without targets
            gradient = gradient - tl.where(x == target, of_loss, 0.0)
        to_ptr = grad_ptr + in_64_bits(row) * V_head + x
        rounded = gradient.to(grad_ptr.dtype.element_ty)
        if IN_PLACE:
            stored = live_of(stored_ptr + in_64_bits(row) * W_head, begin, x, V_head, LANES)  # by the nodes' kernel
            rounded = tl.where(stored, tl.load(to_ptr, mask=x < V_head, other=0.0), rounded)
        tl.store(to_ptr, rounded, mask=x < V_head)


@triton.jit(do_not_specialize=["E", "T_s", "T_t"])
def chain_mixture_kernel(
    student_ptr,
    teacher_ptr,
    row_ptr,
    teacher_row_ptr,
    s_bits_ptr,
    t_bits_ptr,
    partner_ptr,
    ratio_ptr,
    s_lse_ptr,
    t_lse_ptr,
    slope_ptr,
    parts_ptr,
    mass_ptr,
    E,
    T_s,
    T_t,
    V,
    M,
    W,
    s_stride_b,
    s_stride_t,
    t_stride_b,
    t_stride_t,
    scale,
    LANES: tl.constexpr,
    FORM: tl.constexpr,
):
    """Store the generalised JSD of one start, and the gradient's mass; the sum of the teacher's masses is known."""
    event = tl.program_id(0)
    slope = tl.load(slope_ptr + E + event)
    if slope > 0.0:
        own, shift = in_64_bits(event), tl.load(slope_ptr + event)
        base = row_of(student_ptr, tl.load(row_ptr + event), T_s, s_stride_b, s_stride_t)
        t_base = row_of(teacher_ptr, tl.load(teacher_row_ptr + event), T_t, t_stride_b, t_stride_t)
        s_bits, t_bits = s_bits_ptr + own * W, t_bits_ptr + own * W
        s_lse, t_lse = tl.load(s_lse_ptr + event) * LOG2_E, tl.load(t_lse_ptr + event) * LOG2_E
        value = tl.zeros((LANES,), dtype=tl.float32)
        mass = tl.zeros((LANES,), dtype=tl.float32)
        # A class's term is the sum of those of its tokens, each with its own part of the student's mass.
        for begin in range(0, V, LANES * ADJACENT):
            x = columns_of(begin, LANES)
            live = live_of(s_bits, begin, x, V, LANES)
            both = live & live_of(t_bits, begin, x, V, LANES)
            y = tl.load(partner_ptr + x, mask=x < V, other=0)
            log_q = tl.load(base + x, mask=live, other=float("-inf")).to(tl.float32) * (scale * LOG2_E) - s_lse
            log_p = tl.load(t_base + y, mask=both, other=float("-inf")).to(tl.float32) * (scale * LOG2_E) - t_lse
            stored = tl.load(ratio_ptr + own * M - 1 - y, mask=live & (y < 0), other=0.0)
            gap = gap_of(log_q, y, both & (log_q >= LOG_TINY * LOG2_E), log_p, stored)
            q = tl.exp2(log_q)
            value += tl.sum(q * mixture_term(odds_of(gap, shift), FORM), axis=1)
            mass += tl.sum(q * ratio_of(gap, shift, slope, FORM), axis=1)
        total = tl.sum(value, axis=0)
        tl.store(parts_ptr + event, total - FORM * tl.log(total * 0.0 + FORM))
        tl.store(mass_ptr + event, tl.sum(mass, axis=0))
