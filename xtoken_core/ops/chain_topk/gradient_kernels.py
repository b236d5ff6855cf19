"""The Triton kernels of a student row's gradient, where the teacher is known by its listed tokens.

The first writes what is the same for every token of a row, as if no class were listed; the second the tokens of listed
classes; the third the tokens that a node inside the student's token holds, or names. Each computes a logit's whole
gradient in float32 and stores it: it is rounded once.
"""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.chain.gradient_kernels import (
    loss_of_row,
    node_of_row,
    part_of_both,
    part_of_loss,
    part_of_node,
    weight_of,
)
from xtoken_core.ops.chain.node_gradient_kernels import add_node, clear_sums, list_of_node, outermost, start_sums
from xtoken_core.ops.chain.start_kernels import (
    ADJACENT,
    bits_of,
    columns_of,
    exp,
    in_64_bits,
    is_live,
    live_words,
    row_of,
)
from xtoken_core.ops.chain_topk.entry_kernels import tokens_of_classes


@triton.jit
def parts_of_listed_row(row, event, targets_ptr, sums, upstream, nodes, scale, CROSS_ENTROPY: tl.constexpr):
    """Return the values that all logits of a row share: of its loss, of the node that reads it, and of its start."""
    head_lse_ptr, top_ptr, total_ptr, mass_ptr, s_lse_ptr, rest_ratio_ptr = sums
    of_losses_ptr, of_parts_ptr = upstream
    node_chunk_ptr, node_end_ptr, chunks, level_ptr, reads = nodes
    of_loss, target, head_lse = loss_of_row(row, targets_ptr, of_losses_ptr, head_lse_ptr, CROSS_ENTROPY)
    factor, top = node_of_row(
        row, of_parts_ptr, node_chunk_ptr, node_end_ptr, chunks, level_ptr, reads, top_ptr, total_ptr, scale
    )
    # A row at which no chunk starts has event -1: entry 0 is addressed in its place, and masked.
    there, at = event >= 0, tl.maximum(event, 0)
    of_start = tl.load(of_parts_ptr + at, mask=there, other=0.0) * scale
    mass = tl.load(mass_ptr + at, mask=there, other=0.0)
    s_lse = tl.load(s_lse_ptr + at, mask=there, other=0.0)
    rest_ratio = tl.load(rest_ratio_ptr + at, mask=there, other=0.0)
    return of_loss, target, head_lse, factor, top, of_start, mass, s_lse, rest_ratio


@triton.jit
def listed_gradient_at(
    x, there, live, ratio, base, parts, vocabulary, CROSS_ENTROPY: tl.constexpr, UNSCALED: tl.constexpr
):
    """Return the gradient of some of a row's logits in float32, all that is computed element by element.

    `parts` are from `parts_of_listed_row`; `vocabulary` is the number of the tables' tokens and the scale.
    """
    of_loss, target, head_lse, factor, top, of_start, mass, s_lse, _ = parts
    V, scale = vocabulary
    z = tl.load(base + x, mask=there, other=float("-inf")).to(tl.float32)
    gradient = tl.zeros(z.shape, dtype=tl.float32)
    # Most rows start no chunk: the branch is the same for all lanes, and saves an exponential per logit.
    if of_start != 0.0:
        # d KL / d z_x = q_x (mass - P_c / Q_c) for a token x of class c, or of the rest as one class.
        gradient = tl.where(live, exp(z * scale - s_lse) * (mass - ratio) * of_start, 0.0)
    if CROSS_ENTROPY and UNSCALED:
        gradient += part_of_both(x, z, of_loss, target, head_lse, factor, top, V)
    else:
        gradient += part_of_node(x, z, factor, top, V, scale)
        if CROSS_ENTROPY:
            gradient += part_of_loss(x, z, of_loss, target, head_lse)
    return gradient


@triton.jit(do_not_specialize=["chunks", "reads", "T_s"], do_not_specialize_on_alignment=["targets_ptr"])
def chain_listed_row_bwd_kernel(
    student_ptr,
    grad_ptr,
    event_ptr,
    bits_ptr,
    targets_ptr,
    head_lse_ptr,
    top_ptr,
    total_ptr,
    mass_ptr,
    s_lse_ptr,
    rest_ratio_ptr,
    of_losses_ptr,
    of_parts_ptr,
    node_chunk_ptr,
    node_end_ptr,
    chunks,
    level_ptr,
    reads,
    T_s,
    V_head,
    V,
    W,
    stride_b,
    stride_t,
    scale,
    blocks,
    CROSS_ENTROPY: tl.constexpr,
    UNSCALED: tl.constexpr,
    TILES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Store some adjacent tiles of a student row's gradient, as if no class were listed."""
    row = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * (TILES * LANES * ADJACENT)
    event = tl.load(event_ptr + row)
    base = row_of(student_ptr, row, T_s, stride_b, stride_t)
    bits = bits_ptr + in_64_bits(tl.maximum(event, 0)) * W
    parts = parts_of_listed_row(
        row,
        event,
        targets_ptr,
        (head_lse_ptr, top_ptr, total_ptr, mass_ptr, s_lse_ptr, rest_ratio_ptr),
        (of_losses_ptr, of_parts_ptr),
        (node_chunk_ptr, node_end_ptr, chunks, level_ptr, reads),
        scale,
        CROSS_ENTROPY,
    )
    # Without a start no bits are read: there are none for such a row.
    compared = tl.where(event >= 0, V, 0)
    for begin in range(first, tl.minimum(first + TILES * LANES * ADJACENT, V_head), LANES * ADJACENT):
        x = columns_of(begin, LANES)
        live = bits_of(live_words(bits, begin, compared, LANES), x, compared)
        gradient = listed_gradient_at(x, x < V_head, live, parts[8], base, parts, (V, scale), CROSS_ENTROPY, UNSCALED)
        tl.store(grad_ptr + in_64_bits(row) * V_head + x, gradient.to(grad_ptr.dtype.element_ty), mask=x < V_head)


@triton.jit(do_not_specialize=["chunks", "reads", "T_s"], do_not_specialize_on_alignment=["targets_ptr"])
def chain_listed_class_bwd_kernel(
    student_ptr,
    grad_ptr,
    event_ptr,
    bits_ptr,
    targets_ptr,
    head_lse_ptr,
    top_ptr,
    total_ptr,
    mass_ptr,
    s_lse_ptr,
    rest_ratio_ptr,
    of_losses_ptr,
    of_parts_ptr,
    node_chunk_ptr,
    node_end_ptr,
    chunks,
    level_ptr,
    reads,
    T_s,
    V_head,
    V,
    W,
    stride_b,
    stride_t,
    scale,
    t_row_ptr,
    class_ptr,
    heads_ptr,
    ratio_ptr,
    class_start_ptr,
    class_token_ptr,
    K,
    groups,
    CROSS_ENTROPY: tl.constexpr,
    UNSCALED: tl.constexpr,
    ENTRIES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Store a row's gradient at the live tokens of some of the classes that are listed at its start."""
    row, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    event = tl.load(event_ptr + row)
    at = tl.maximum(event, 0)
    if (event >= 0) & (tl.load(of_parts_ptr + at) != 0.0):
        base = row_of(student_ptr, row, T_s, stride_b, stride_t)
        own = in_64_bits(at)
        parts = parts_of_listed_row(
            row,
            event,
            targets_ptr,
            (head_lse_ptr, top_ptr, total_ptr, mass_ptr, s_lse_ptr, rest_ratio_ptr),
            (of_losses_ptr, of_parts_ptr),
            (node_chunk_ptr, node_end_ptr, chunks, level_ptr, reads),
            scale,
            CROSS_ENTROPY,
        )
        i = group * ENTRIES + tl.arange(0, ENTRIES)
        # Only heads stand for a class; a token's class has one head, so no logit is stored twice.
        head = tl.load(heads_ptr + own * K + i, mask=i < K, other=-1.0) >= 0.0
        # [ENTRIES, 1], against [ENTRIES, LANES] tokens of the classes.
        ratio = tl.load(ratio_ptr + own * K + i, mask=head, other=0.0)[:, None]
        class_ptr += tl.load(t_row_ptr + at).to(tl.int64) * K
        first, count = tokens_of_classes(i, head, class_ptr, class_start_ptr)
        # Until the longest of these classes is through; shorter ones are masked.
        for begin in range(0, tl.max(count, axis=0), LANES):
            j = begin + tl.arange(0, LANES)[None, :]
            there = j < count[:, None]
            x = tl.load(class_token_ptr + first[:, None] + j, mask=there, other=0)
            live = there & is_live(bits_ptr + own * W, x, there)
            gradient = listed_gradient_at(x, live, live, ratio, base, parts, (V, scale), CROSS_ENTROPY, UNSCALED)
            tl.store(grad_ptr + in_64_bits(row) * V_head + x, gradient.to(grad_ptr.dtype.element_ty), mask=live)


@triton.jit
def ratio_of_tokens(x, listed, classes, rest_ratio, STEPS: tl.constexpr):
    """Return the ratios of tokens' classes at a start: that of the head, found by halving, or that of the rest."""
    root_ptr, class_ptr, ratio_ptr, K = classes
    cls = tl.load(root_ptr + x, mask=listed, other=0)
    low, high = x * 0, x * 0 + K
    # The first entry of a class is its head: entries are in the order of their classes.
    for _ in range(STEPS):
        middle = (low + high) // 2
        open_ = listed & (low < high)
        behind = open_ & (tl.load(class_ptr + middle, mask=open_, other=0) < cls)
        low = tl.where(behind, middle + 1, low)
        high = tl.where(open_ & (behind == 0), middle, high)
    head_ratio = tl.load(ratio_ptr + low, mask=listed & (low < K), other=0.0)
    return tl.where(listed, head_ratio, rest_ratio)


@triton.jit
def store_listed_tokens(
    tokens,
    own_ptr,
    event,
    base,
    parts,
    bits,
    classes,
    vocabulary,
    CROSS_ENTROPY: tl.constexpr,
    UNSCALED: tl.constexpr,
    STEPS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Store the gradient of a list of a row's tokens, from the row's common values and the accumulated sums."""
    list_ptr, first, last, sum_ptr = tokens
    bits_ptr, rest_bits_ptr = bits
    compared = tl.where(event >= 0, last, first)
    for begin in range(first, last, SLOTS):
        at = begin + tl.arange(0, SLOTS)
        x = tl.load(list_ptr + at, mask=at < last, other=0)
        live = is_live(bits_ptr, x, at < compared)
        # Live, but not among the live tokens of the rest: its class is listed.
        listed = live & (is_live(rest_bits_ptr, x, at < compared) == 0)
        ratio = ratio_of_tokens(x, listed, classes, parts[8], STEPS)
        gradient = listed_gradient_at(x, at < last, live, ratio, base, parts, vocabulary, CROSS_ENTROPY, UNSCALED)
        gradient += tl.load(sum_ptr + at - first, mask=at < last, other=0.0)
        tl.store(own_ptr + x, gradient.to(own_ptr.dtype.element_ty), mask=at < last)


@triton.jit(
    do_not_specialize=["chunks", "reads", "T_s", "R", "i_events"], do_not_specialize_on_alignment=["targets_ptr"]
)
def chain_listed_node_bwd_kernel(
    student_ptr,
    grad_ptr,
    event_ptr,
    bits_ptr,
    targets_ptr,
    head_lse_ptr,
    top_ptr,
    total_ptr,
    mass_ptr,
    s_lse_ptr,
    rest_ratio_ptr,
    of_losses_ptr,
    of_parts_ptr,
    node_chunk_ptr,
    node_end_ptr,
    chunks,
    level_ptr,
    reads,
    T_s,
    V_head,
    V,
    W,
    stride_b,
    stride_t,
    scale,
    t_row_ptr,
    class_ptr,
    ratio_ptr,
    rest_bits_ptr,
    root_ptr,
    K,
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
    CROSS_ENTROPY: tl.constexpr,
    UNSCALED: tl.constexpr,
    STEPS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Compute one student row after the other: the tokens that a node inside its token holds or one before it names."""
    inside_ptr = sums_ptr + tl.program_id(0).to(tl.int64) * capacity
    named_ptr = inside_ptr + i_capacity
    # A fixed number of programs, each with scratch of its own for sums: memory does not grow with the batch.
    for i in range(tl.program_id(0), R, tl.num_programs(0)):
        row = in_64_bits(i)
        base = row_of(student_ptr, row, T_s, stride_b, stride_t)
        chunk = tl.load(event_ptr + row)
        at = tl.maximum(chunk, 0)
        own, own_ptr = in_64_bits(at), grad_ptr + row * V_head
        of_class_ptr = class_ptr + tl.load(t_row_ptr + at).to(tl.int64) * K
        parts = parts_of_listed_row(
            row,
            chunk,
            targets_ptr,
            (head_lse_ptr, top_ptr, total_ptr, mass_ptr, s_lse_ptr, rest_ratio_ptr),
            (of_losses_ptr, of_parts_ptr),
            (node_chunk_ptr, node_end_ptr, chunks, level_ptr, reads),
            scale,
            CROSS_ENTROPY,
        )
        begin = tl.load(i_first_ptr + chunk, mask=chunk >= 0, other=0).to(tl.int32)
        end = tl.minimum(begin + tl.load(i_size_ptr + chunk, mask=chunk >= 0, other=0).to(tl.int32), i_events)
        outer = outermost(i_chunk_ptr, chunk, begin, end)
        _, first, last = list_of_node(i_node_ptr, i_list_start_ptr, outer, outer >= 0)
        before = row - 1
        named = tl.load(node_chunk_ptr + before, mask=(row > 0) & (before < reads), other=-1)
        weight = weight_of(before, named, node_end_ptr, of_parts_ptr, chunks, named >= 0) * scale
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
                values, upstream = (ratios_ptr, i_mass_ptr, i_held_lse_ptr), (i_end_ptr, of_parts_ptr, chunks)
                add_node(event, chunk, rank, held_list, named_list, base, tables, values, upstream, scale, SLOTS)
        bits, vocabulary = (bits_ptr + own * W, rest_bits_ptr + own * W), (V, scale)
        classes = root_ptr, of_class_ptr, ratio_ptr + own * K, K
        store_listed_tokens(
            held_list, own_ptr, chunk, base, parts, bits, classes, vocabulary, CROSS_ENTROPY, UNSCALED, STEPS, SLOTS
        )
        tl.debug_barrier()  # what is in both lists is stored again, with all its parts
        store_listed_tokens(
            named_list, own_ptr, chunk, base, parts, bits, classes, vocabulary, CROSS_ENTROPY, UNSCALED, STEPS, SLOTS
        )
        tl.debug_barrier()
