"""The Triton kernel of the chain divergence at nodes inside tokens of one side, the holder; the other one is fresh.

A slot's tokens lie in segments, both the holder's and those of the slot's class on the fresh side: a lane adds up a
segment, and a slot is the sum of its segments.
"""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.chain.form_kernels import SUMS, floored_log, is_generated, terms_of, value_of
from xtoken_core.ops.chain.start_kernels import exp, finite, in_64_bits, row_of, sum_over_lanes

SMALL_REST = tl.constexpr(0.25)
"""A smaller mass of the classes that no slot names is summed; a larger one is what the named ones leave of 1."""


@triton.jit
def marked(flag_ptr, slot_class_ptr, slot, slots, SET: tl.constexpr, SLOTS: tl.constexpr):
    """Set the bits of a node's classes, or clear all that are set."""
    for begin in range(0, slots, SLOTS):
        k = begin + tl.arange(0, SLOTS)
        cls = tl.load(slot_class_ptr + slot + k, mask=k < slots, other=-1)
        # Different classes share a word: setting is atomic. Clearing writes whole words: all bits are this node's.
        if SET:
            tl.atomic_or(flag_ptr + (cls >> 5), (k * 0 + 1) << (cls & 31), mask=cls >= 0, sem="relaxed")
        else:
            tl.store(flag_ptr + (cls >> 5), k * 0, mask=cls >= 0)


@triton.jit
def unnamed_sum(
    base, root_ptr, flag_ptr, slot_class_ptr, slot, slots, V, scale, top, BLOCK: tl.constexpr, SLOTS: tl.constexpr
):
    """Return the sum of `exp(logit - top)` over the tokens whose class no slot names."""
    marked(flag_ptr, slot_class_ptr, slot, slots, True, SLOTS)
    tl.debug_barrier()  # bits are set by other threads than those that read them
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for begin in range(0, V, BLOCK):
        x = begin + tl.arange(0, BLOCK)
        cls = tl.load(root_ptr + x, mask=x < V, other=0)
        rest = (x < V) & (((tl.load(flag_ptr + (cls >> 5), mask=x < V, other=0) >> (cls & 31)) & 1) == 0)
        z = tl.load(base + x, mask=rest, other=float("-inf")).to(tl.float32) * scale
        total += exp(z - top)
    tl.debug_barrier()
    marked(flag_ptr, slot_class_ptr, slot, slots, False, SLOTS)
    tl.debug_barrier()
    return tl.sum(total, axis=0)


@triton.jit
def member_log_sum(base, member_ptr, first, last, scale, SLOTS: tl.constexpr):
    """Return `log sum exp` of a node's tokens, 0 if all are -inf."""
    top = tl.full((SLOTS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((SLOTS,), dtype=tl.float32)
    for begin in range(first, last, SLOTS):
        at = begin + tl.arange(0, SLOTS)
        x = tl.load(member_ptr + at, mask=at < last, other=0)
        z = tl.load(base + x, mask=at < last, other=float("-inf")).to(tl.float32) * scale
        new = tl.maximum(top, z)
        pivot = finite(new)
        total = total * exp(top - pivot) + exp(z - pivot)
        top = new
    highest, whole = sum_over_lanes(top, total)
    return tl.where(whole > 0.0, tl.log(whole) + highest, 0.0)


@triton.jit
def store_segment_sums(
    base,
    segment_start_ptr,
    member_start_ptr,
    member_ptr,
    slot,
    slots,
    scale,
    pivot,
    factor,
    sums_ptr,
    SLOTS: tl.constexpr,
):
    """Store `factor` times the sum of `exp(logit - pivot)` over every segment of a node's slots."""
    # A slot can have thousands of tokens or one: in segments of at most 32 no lane loops longer than that.
    first, last = tl.load(segment_start_ptr + slot), tl.load(segment_start_ptr + slot + slots)
    for begin in range(first, last, SLOTS):
        segment = begin + tl.arange(0, SLOTS)
        there = segment < last
        start = tl.load(member_start_ptr + segment, mask=there, other=0)
        count = tl.load(member_start_ptr + segment + 1, mask=there, other=0) - start
        total = tl.zeros((SLOTS,), dtype=tl.float32)
        for j in range(tl.max(count, axis=0)):  # a lane per segment
            x = tl.load(member_ptr + start + j, mask=j < count, other=0)
            z = tl.load(base + x, mask=j < count, other=float("-inf")).to(tl.float32) * scale
            total += exp(z - pivot)
        tl.store(sums_ptr + segment - first, total * factor, mask=there)


@triton.jit
def slot_sums(k, slot, slots, segment_start_ptr, sums_ptr):
    """Return the sums of some of a node's slots."""
    first = tl.load(segment_start_ptr + slot)
    begin = tl.load(segment_start_ptr + slot + k, mask=k < slots, other=0)
    count = tl.load(segment_start_ptr + slot + k + 1, mask=k < slots, other=0) - begin
    total = tl.zeros(k.shape, dtype=tl.float32)
    for i in range(tl.max(count, axis=0)):
        total += tl.load(sums_ptr + begin + i - first, mask=i < count, other=0.0)
    return total


@triton.jit
def compare_slots(
    slot,
    slots,
    slot_class_ptr,
    held_segment_ptr,
    held_sums_ptr,
    fresh_segment_ptr,
    fresh_sums_ptr,
    ratio_ptr,
    generated,
    sums,
    HOLDER_LEARNS: tl.constexpr,
    SLOTS: tl.constexpr,
    FORM: tl.constexpr,
):
    """Store the ratios of the slots that name a class; return the sums of their terms, and the other slot.

    Returns:
        Sums of the terms, of the teacher's mass and of the gradient's (`terms_of`), what the classes have on the fresh
        side, what the tokens that end here have on the holder's, and their slot, -1 = none.
    """
    kl = tl.zeros((SLOTS,), dtype=tl.float32)
    mass = tl.zeros((SLOTS,), dtype=tl.float32)
    kept = tl.zeros((SLOTS,), dtype=tl.float32)
    named = tl.zeros((SLOTS,), dtype=tl.float32)
    ending = tl.zeros((SLOTS,), dtype=tl.float32)
    ends_at = tl.full((SLOTS,), -1, dtype=tl.int32)
    for begin in range(0, slots, SLOTS):
        k = begin + tl.arange(0, SLOTS)
        cls = tl.load(slot_class_ptr + slot + k, mask=k < slots, other=0)
        q = slot_sums(k, slot, slots, held_segment_ptr, held_sums_ptr)
        p = slot_sums(k, slot, slots, fresh_segment_ptr, fresh_sums_ptr)
        named += p
        ending += tl.where(cls < 0, q, 0.0)
        ends_at = tl.where(cls < 0, k, ends_at)
        # Tokens that end here have no class: their slot is compared with the rest, once that is known.
        q = tl.where(cls < 0, 0.0, q)
        # p is always the teacher's and q the student's, whichever of them holds the node.
        if not HOLDER_LEARNS:
            p, q = q, p
        term, of_mass, ratio = terms_of(p, q, generated, sums, FORM)
        kl += term
        mass += p
        kept += of_mass
        tl.store(ratio_ptr + k, ratio, mask=(k < slots) & (cls >= 0))
    return (
        tl.sum(kl, axis=0),
        tl.sum(mass, axis=0),
        tl.sum(kept, axis=0),
        tl.sum(named, axis=0),
        tl.sum(ending, axis=0),
        tl.max(ends_at, axis=0),
    )


@triton.jit(do_not_specialize=["E", "T_h", "T_f"])
def chain_node_kernel(
    holder_ptr,
    fresh_ptr,
    chunk_ptr,
    holder_row_ptr,
    fresh_row_ptr,
    node_ptr,
    slot_start_ptr,
    slot_class_ptr,
    held_segment_ptr,
    held_start_ptr,
    held_ptr,
    fresh_segment_ptr,
    fresh_start_ptr,
    fresh_token_ptr,
    root_ptr,
    top_ptr,
    total_ptr,
    flag_ptr,
    held_sums_ptr,
    fresh_sums_ptr,
    held_capacity,
    fresh_capacity,
    value_ptr,
    mass_ptr,
    level_ptr,
    held_lse_ptr,
    ratio_ptr,
    generated_ptr,
    most_slots,
    E,
    T_h,
    T_f,
    V,
    flags,
    h_stride_b,
    h_stride_t,
    f_stride_b,
    f_stride_t,
    scale,
    HOLDER_LEARNS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    FORM: tl.constexpr,
):
    """Compute the divergence of one node after the other."""
    # Forms but the forward KL need sums over all classes before any term: slots are compared twice, first for these.
    FIRST: tl.constexpr = SUMS if FORM != 0.0 else FORM
    program = tl.program_id(0).to(tl.int64)
    flag_ptr += program * flags
    held_sums_ptr += program * held_capacity
    fresh_sums_ptr += program * fresh_capacity
    # Nodes differ in size, and padding has none: programs take events in turn, each with its own flags and sums.
    for event in range(tl.program_id(0), E, tl.num_programs(0)):
        if tl.load(chunk_ptr + event) >= 0:
            node, row = tl.load(node_ptr + event), tl.load(fresh_row_ptr + event)
            slot = tl.load(slot_start_ptr + node)
            slots = tl.load(slot_start_ptr + node + 1) - slot
            holder_row = tl.load(holder_row_ptr + event)
            generated = is_generated(generated_ptr, holder_row if HOLDER_LEARNS else row, FORM)
            holder = row_of(holder_ptr, holder_row, T_h, h_stride_b, h_stride_t)
            fresh = row_of(fresh_ptr, row, T_f, f_stride_b, f_stride_t)
            first = tl.load(held_start_ptr + tl.load(held_segment_ptr + slot))
            last = tl.load(held_start_ptr + tl.load(held_segment_ptr + slot + slots))
            # the holder's distribution is renormalised over the node
            held_lse = member_log_sum(holder, held_ptr, first, last, scale, SLOTS)
            store_segment_sums(
                holder,
                held_segment_ptr,
                held_start_ptr,
                held_ptr,
                slot,
                slots,
                scale,
                held_lse,
                1.0,
                held_sums_ptr,
                SLOTS,
            )
            ratio = ratio_ptr + in_64_bits(event) * most_slots
            # The fresh side's is not: its sum over the whole row is known from the row's own kernel.
            top, total = tl.load(top_ptr + row), tl.load(total_ptr + row)
            store_segment_sums(
                fresh,
                fresh_segment_ptr,
                fresh_start_ptr,
                fresh_token_ptr,
                slot,
                slots,
                scale,
                top,
                1.0 / total,
                fresh_sums_ptr,
                SLOTS,
            )
            tl.debug_barrier()  # sums of segments are read by other threads
            sums = 0.0, 0.0, 0.0
            kl, mass, kept, named, ending, ends_at = compare_slots(
                slot,
                slots,
                slot_class_ptr,
                held_segment_ptr,
                held_sums_ptr,
                fresh_segment_ptr,
                fresh_sums_ptr,
                ratio,
                generated,
                sums,
                HOLDER_LEARNS,
                SLOTS,
                FIRST,
            )
            level = kept * 0.0  # a zero of its type, which both ways of the branch below must give
            if FORM != 0.0:
                rest_p, rest_q = level, level
            tl.debug_barrier()
            if ends_at >= 0:
                # The fresh side's rest beside what ends here; 1 - named loses its digits where named is near 1.
                p, q = 1.0 - named, ending
                if p < SMALL_REST:
                    p = (
                        unnamed_sum(fresh, root_ptr, flag_ptr, slot_class_ptr, slot, slots, V, scale, top, BLOCK, SLOTS)
                        / total
                    )
                if not HOLDER_LEARNS:
                    p, q = q, p
                term, of_mass, level = terms_of(p, q, generated, sums, FIRST)
                kl += term
                mass += p
                kept += of_mass
                tl.store(ratio + ends_at, level)
                if FORM != 0.0:
                    rest_p, rest_q = p, q
            reach = kept
            if FORM != 0.0:
                # Terms of generated text need the sums: the slots are compared again, and their ratios replaced.
                tl.debug_barrier()
                sums = mass, reach, kl
                kl, mass, kept, named, ending, ends_at = compare_slots(
                    slot,
                    slots,
                    slot_class_ptr,
                    held_segment_ptr,
                    held_sums_ptr,
                    fresh_segment_ptr,
                    fresh_sums_ptr,
                    ratio,
                    generated,
                    sums,
                    HOLDER_LEARNS,
                    SLOTS,
                    FORM,
                )
                if ends_at >= 0:
                    term, of_mass, level = terms_of(rest_p, rest_q, generated, sums, FORM)
                    kl += term
                    mass += rest_p
                    kept += of_mass
                    tl.store(ratio + ends_at, level)
            tl.store(value_ptr + event, value_of(kl, mass, generated, reach, FORM))
            tl.store(mass_ptr + event, kept)
            tl.store(level_ptr + event, kept - level)
            tl.store(held_lse_ptr + event, held_lse)


@triton.jit
def sums_of_blocks(terms_ptr, blocks, chunk, starts, chunks, BLOCK: tl.constexpr, TERMS: tl.constexpr):
    """Return the sums of some starts' terms over the blocks of classes, `TERMS` at once."""
    # [TERMS, BLOCK]: terms lie by block of classes, chunks side by side. The order of the sum is fixed.
    value = tl.zeros((TERMS, BLOCK), dtype=tl.float32)
    mass = tl.zeros((TERMS, BLOCK), dtype=tl.float32)
    unclipped = tl.zeros((TERMS, BLOCK), dtype=tl.float32)
    for begin in range(0, blocks, TERMS):
        block = begin + tl.arange(0, TERMS)[:, None]
        there = (block < blocks) & starts[None, :]
        from_ptr = terms_ptr + block.to(tl.int64) * 3 * chunks + chunk[None, :]
        value += tl.load(from_ptr, mask=there, other=0.0)
        mass += tl.load(from_ptr + chunks, mask=there, other=0.0)
        unclipped += tl.load(from_ptr + 2 * chunks, mask=there, other=0.0)
    return tl.sum(value, axis=0), tl.sum(mass, axis=0), tl.sum(unclipped, axis=0)


@triton.jit(do_not_specialize=["s_events", "t_events", "chunks"])
def chain_part_kernel(
    chunk_ptr,
    student_row_ptr,
    generated_ptr,
    terms_ptr,
    blocks,
    s_value_ptr,
    s_chunk_ptr,
    s_end_ptr,
    s_first_ptr,
    s_size_ptr,
    s_events,
    t_value_ptr,
    t_chunk_ptr,
    t_end_ptr,
    t_first_ptr,
    t_size_ptr,
    t_events,
    parts_ptr,
    mass_ptr,
    slope_ptr,
    chunks,
    BLOCK: tl.constexpr,
    TERMS: tl.constexpr,
    FORM: tl.constexpr,
):
    """Compute each chunk's parts: at its start, over its nodes inside tokens, and after its last token."""
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = chunk < chunks
    starts = tl.load(chunk_ptr + chunk, mask=there, other=-1) >= 0
    value, mass, unclipped = sums_of_blocks(terms_ptr, blocks, chunk, starts, chunks, BLOCK, TERMS)
    inner = tl.zeros((BLOCK,), dtype=tl.float32)
    end = tl.zeros((BLOCK,), dtype=tl.float32)
    inner, end = add_nodes(
        s_value_ptr, s_chunk_ptr, s_end_ptr, s_first_ptr, s_size_ptr, s_events, chunk, there, inner, end
    )
    inner, end = add_nodes(
        t_value_ptr, t_chunk_ptr, t_end_ptr, t_first_ptr, t_size_ptr, t_events, chunk, there, inner, end
    )
    generated = False
    if FORM != 0.0:
        generated = (
            tl.load(generated_ptr + tl.load(student_row_ptr + chunk, mask=there, other=0), mask=there, other=0) != 0
        )
        known = generated & (mass > 0.0) & (unclipped > 0.0)
        # Shift and slope of `ratio_of`; the JSD's value and mass are computed after these (`chain_mixture_kernel`).
        shift, slope, of_generated = -floored_log(mass), value * 0.0 + (1.0 - FORM), value * 0.0
        if FORM == 1.0:
            reach = tl.where(known, unclipped, 1.0)
            value = tl.where(known, value / reach, value)
            shift, slope, of_generated = 1.0 + value, 1.0 / reach, tl.where(known, 1.0, 0.0)
        tl.store(slope_ptr + chunk, shift, mask=there)
        tl.store(slope_ptr + chunks + chunk, tl.where(generated, tl.where(known, slope, 0.0), -1.0), mask=there)
    tl.store(parts_ptr + chunk, value_of(value, mass, generated, unclipped, FORM), mask=there)
    if FORM != 0.0:
        unclipped = tl.where(generated, of_generated, unclipped)
    tl.store(parts_ptr + chunks + chunk, inner, mask=there)
    tl.store(parts_ptr + 2 * chunks + chunk, end, mask=there)
    tl.store(mass_ptr + chunk, unclipped, mask=there)


@triton.jit
def add_nodes(value_ptr, chunk_ptr, end_ptr, first_ptr, size_ptr, events, chunk, there, inner, end):
    """Add the values of one side's nodes of some chunks."""
    first = tl.load(first_ptr + chunk, mask=there, other=0)
    size = tl.load(size_ptr + chunk, mask=there, other=0)
    # Events of a chunk are those at the other side's positions of it; one that belongs to no node has chunk -1.
    for i in range(tl.max(size, axis=0)):
        event = first + i
        inside = there & (i < size) & (event < events)
        own = inside & (tl.load(chunk_ptr + event, mask=inside, other=-1) == chunk)
        value = tl.load(value_ptr + event, mask=own, other=0.0)
        at_end = tl.load(end_ptr + event, mask=own, other=0) != 0
        inner += tl.where(at_end, 0.0, value)
        end += tl.where(at_end, value, 0.0)
    return inner, end
