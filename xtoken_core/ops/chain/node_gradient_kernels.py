"""The Triton kernel of the gradients of nodes at single tokens: those of a node inside a token, and named classes.

What is the same for a whole row is in `gradient_kernels`. This kernel computes that again at the tokens of a row whose
gradient has more parts, adds these in float32, and stores the sum: every logit's gradient is rounded once.
"""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.chain.gradient_kernels import gradient_at, parts_of_row, weight_of
from xtoken_core.ops.chain.start_kernels import exp, in_64_bits, is_live, row_of


@triton.jit
def add_inside_token(tokens, base, rank, node, slot, spelled, values, scale, SLOTS: tl.constexpr):
    """Add the gradient of a node inside the student's token to those tokens of a list that the node holds.

    A token is held if the piece of its spelling at the node's depth, `rank`, reaches the node.
    """
    list_ptr, first, last, sum_ptr = tokens
    spelling_start_ptr, spelled_node_ptr, spelled_slot_ptr = spelled
    ratio_ptr, mass, held_lse, weight = values
    for begin in range(first, last, SLOTS):
        at = begin + tl.arange(0, SLOTS)
        x = tl.load(list_ptr + at, mask=at < last, other=0)
        piece = tl.load(spelling_start_ptr + x, mask=at < last, other=0) + rank
        end = tl.load(spelling_start_ptr + x + 1, mask=at < last, other=0)
        held = (at < last) & (piece < end)
        held = held & (tl.load(spelled_node_ptr + piece, mask=held, other=-1) == node)
        k = tl.load(spelled_slot_ptr + piece, mask=held, other=0) - slot
        z = tl.load(base + x, mask=held, other=float("-inf")).to(tl.float32) * scale
        # q (mass - P_k / Q_k)
        slope = exp(z - held_lse) * (mass - tl.load(ratio_ptr + k, mask=held, other=0.0)) * weight
        # Several nodes of a chunk hold the same token: sums stay in float32 until all are added.
        before = tl.load(sum_ptr + at - first, mask=held, other=0.0)
        tl.store(sum_ptr + at - first, before + slope, mask=held)


@triton.jit
def start_sums(tokens, slot_ptr, slot, base, ratio_ptr, level, mass, pivot, weight, scale, SLOTS: tl.constexpr):
    """Store what the named classes of a node differ by from the others."""
    list_ptr, first, last, sum_ptr = tokens
    for begin in range(first, last, SLOTS):
        at = begin + tl.arange(0, SLOTS)
        there = at < last
        x = tl.load(list_ptr + at, mask=there, other=0)
        k = tl.load(slot_ptr + at, mask=there, other=0) - slot
        z = tl.load(base + x, mask=there, other=float("-inf")).to(tl.float32) * scale
        ratio = tl.load(ratio_ptr + k, mask=there, other=0.0)
        # `part_of_node` gives every token `level`, as if no class were named: named ones get the difference.
        tl.store(sum_ptr + at - first, exp(z - pivot) * (mass - level - ratio) * weight, mask=there)


@triton.jit
def add_node(event, chunk, rank, held, named, base, tables, values, upstream, scale, SLOTS: tl.constexpr):
    """Add the gradient of one node inside the student's token to both lists of its row."""
    node_ptr, slot_start_ptr, spelling_start_ptr, spelled_node_ptr, spelled_slot_ptr = tables
    ratios_ptr, mass_ptr, held_lse_ptr = values
    end_ptr, of_start_ptr, E = upstream
    node, mass, held_lse = tl.load(node_ptr + event), tl.load(mass_ptr + event), tl.load(held_lse_ptr + event)
    slot = tl.load(slot_start_ptr + node)
    weight = weight_of(event, chunk, end_ptr, of_start_ptr, E, chunk >= 0) * scale
    spelled = spelling_start_ptr, spelled_node_ptr, spelled_slot_ptr
    of_node = ratios_ptr, mass, held_lse, weight
    add_inside_token(held, base, rank, node, slot, spelled, of_node, scale, SLOTS)
    add_inside_token(named, base, rank, node, slot, spelled, of_node, scale, SLOTS)
    tl.debug_barrier()  # the next node adds to the same sums, by other threads


@triton.jit
def clear_sums(sum_ptr, count, SLOTS: tl.constexpr):
    """Store zeros."""
    for begin in range(0, count, SLOTS):
        at = begin + tl.arange(0, SLOTS)
        tl.store(sum_ptr + at, tl.zeros((SLOTS,), dtype=tl.float32), mask=at < count)


@triton.jit
def store_list(
    tokens,
    own_ptr,
    event,
    base,
    parts,
    bits,
    classes,
    stored_ptr,
    TARGETS: tl.constexpr,
    UNSCALED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    FORM: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Store the gradient of a list of a row's tokens, from the row's common values and the accumulated sums.

    In place, a token that is stored already stays as it is, and the others are marked.
    """
    list_ptr, first, last, sum_ptr = tokens
    s_bits_ptr, t_bits_ptr = bits
    compared = tl.where(event >= 0, last, first)
    for begin in range(first, last, SLOTS):
        at = begin + tl.arange(0, SLOTS)
        x = tl.load(list_ptr + at, mask=at < last, other=0)
        live, t_live = is_live(s_bits_ptr, x, at < compared), is_live(t_bits_ptr, x, at < compared)
        gradient = gradient_at(x, at < last, live, live & t_live, base, parts, classes, TARGETS, UNSCALED, FORM)
        gradient += tl.load(sum_ptr + at - first, mask=at < last, other=0.0)
        there = at < last
        if IN_PLACE:
            # The first list that marks a token has stored it; another thread may hold the same word, hence the atomic.
            bit = (x * 0 + 1) << (x & 31)
            before = tl.atomic_or(stored_ptr + (x >> 5), bit, mask=there, sem="relaxed")
            there = there & ((before & bit) == 0)
        tl.store(own_ptr + x, gradient.to(own_ptr.dtype.element_ty), mask=there)


@triton.jit
def outermost(chunk_ptr, chunk, begin, end):
    """Return a chunk's first node inside its token, -1 = none; it holds the tokens of all others."""
    outer = begin * 0 - 1
    for event in range(begin, end):
        outer = tl.where((outer < 0) & (tl.load(chunk_ptr + event) == chunk), event, outer)
    return outer


@triton.jit
def list_of_node(node_ptr, start_ptr, event, known):
    """Return an event's node, and where its tokens begin and end; none if it is not known."""
    node = tl.load(node_ptr + event, mask=known, other=0)
    first = tl.load(start_ptr + node, mask=known, other=0)
    return node, first, tl.load(start_ptr + node + 1, mask=known, other=0)


@triton.jit(
    do_not_specialize=["E", "reads", "T_s", "T_t", "first_row", "R", "i_events"],
    do_not_specialize_on_alignment=["targets_ptr"],
)
def chain_node_bwd_kernel(
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
    R,
    i_chunk_ptr,
    i_first_ptr,
    i_size_ptr,
    i_events,
    i_node_ptr,
    i_slot_start_ptr,
    i_list_start_ptr,
    i_list_ptr,
    i_held_lse_ptr,
    i_mass_ptr,
    i_ratio_ptr,
    i_slots,
    i_end_ptr,
    spelling_start_ptr,
    spelled_node_ptr,
    spelled_slot_ptr,
    o_node_ptr,
    o_slot_start_ptr,
    o_list_start_ptr,
    o_list_ptr,
    o_slot_ptr,
    o_mass_ptr,
    o_ratio_ptr,
    o_slots,
    sums_ptr,
    capacity,
    i_capacity,
    TARGETS: tl.constexpr,
    UNSCALED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    FORM: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Compute one student row after the other: the tokens that a node inside its token holds or one before it names."""
    inside_ptr = sums_ptr + tl.program_id(0).to(tl.int64) * capacity
    named_ptr = inside_ptr + i_capacity
    # Lists of rows differ in length, and most are empty: programs take rows in turn, each with scratch of its own.
    for i in range(first_row + tl.program_id(0), R, tl.num_programs(0)):
        row = in_64_bits(i)
        base = row_of(student_ptr, row, T_s, s_stride_b, s_stride_t)
        chunk = tl.load(event_ptr + row)
        own, own_ptr = in_64_bits(tl.maximum(chunk, 0)), grad_ptr + row * V_head
        parts = parts_of_row(
            row,
            chunk,
            (teacher_ptr, targets_ptr, teacher_row_ptr),
            (head_lse_ptr, top_ptr, total_ptr, mass_ptr, s_lse_ptr, t_lse_ptr, slope_ptr),
            (of_losses_ptr, of_start_ptr),
            (node_chunk_ptr, node_end_ptr, E, level_ptr, reads),
            (T_t, t_stride_b, t_stride_t),
            scale,
            TARGETS,
            FORM,
        )
        # Nodes inside the student's token are events at the teacher's positions of the chunk, which are adjacent.
        begin = tl.load(i_first_ptr + chunk, mask=chunk >= 0, other=0).to(tl.int32)
        end = tl.minimum(begin + tl.load(i_size_ptr + chunk, mask=chunk >= 0, other=0).to(tl.int32), i_events)
        outer = outermost(i_chunk_ptr, chunk, begin, end)
        _, first, last = list_of_node(i_node_ptr, i_list_start_ptr, outer, outer >= 0)
        # A node inside the teacher's token is read by the student's next position: the event of the row before.
        before = row - 1
        named = tl.load(node_chunk_ptr + before, mask=(row > 0) & (before < reads), other=-1)
        weight = weight_of(before, named, node_end_ptr, of_start_ptr, E, named >= 0) * scale
        node, o_first, o_last = list_of_node(o_node_ptr, o_list_start_ptr, before, weight != 0.0)
        held_list, named_list = (i_list_ptr, first, last, inside_ptr), (o_list_ptr, o_first, o_last, named_ptr)
        start_sums(
            named_list,
            o_slot_ptr,
            tl.load(o_slot_start_ptr + node),
            base,
            o_ratio_ptr + in_64_bits(before) * o_slots,
            tl.load(level_ptr + before, mask=named >= 0, other=0.0),
            tl.load(o_mass_ptr + before, mask=named >= 0, other=0.0),
            tl.load(top_ptr + row),
            weight / tl.load(total_ptr + row),
            scale,
            SLOTS,
        )
        clear_sums(inside_ptr, last - first, SLOTS)
        tl.debug_barrier()
        for event in range(begin, end):
            if tl.load(i_chunk_ptr + event) == chunk:
                rank, ratios_ptr = event - begin, i_ratio_ptr + in_64_bits(event) * i_slots
                tables = i_node_ptr, i_slot_start_ptr, spelling_start_ptr, spelled_node_ptr, spelled_slot_ptr
                values, upstream = (ratios_ptr, i_mass_ptr, i_held_lse_ptr), (i_end_ptr, of_start_ptr, E)
                add_node(event, chunk, rank, held_list, named_list, base, tables, values, upstream, scale, SLOTS)
        bits, classes = (s_bits_ptr + own * W, t_bits_ptr + own * W), (partner_ptr, ratio_ptr + own * M, V, scale)
        # What is in both lists has all its parts in the second one only, so that is what stays.
        if not IN_PLACE:
            store_list(
                held_list, own_ptr, chunk, base, parts, bits, classes, stored_ptr, TARGETS, UNSCALED, False, FORM, SLOTS
            )
            tl.debug_barrier()
        marks_ptr = stored_ptr + row * W_head
        store_list(
            named_list, own_ptr, chunk, base, parts, bits, classes, marks_ptr, TARGETS, UNSCALED, IN_PLACE, FORM, SLOTS
        )
        if IN_PLACE:
            tl.debug_barrier()
            store_list(
                held_list, own_ptr, chunk, base, parts, bits, classes, marks_ptr, TARGETS, UNSCALED, True, FORM, SLOTS
            )
        tl.debug_barrier()
