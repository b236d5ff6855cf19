"""The Triton kernels of nodes inside tokens of one side, where the teacher is known by its listed tokens."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.chain.form_kernels import SUMS, TINY, floored_log, is_generated, terms_of, value_of
from xtoken_core.ops.chain.node_kernels import (
    SMALL_REST,
    add_nodes,
    member_log_sum,
    slot_sums,
    store_segment_sums,
    unnamed_sum,
)
from xtoken_core.ops.chain.start_kernels import exp, finite, in_64_bits, row_of

OPEN = tl.constexpr(float("-inf"))
"""For the ratio of a slot that is compared together with others."""


@triton.jit
def compare_named(
    node_slots,
    classes,
    mass_of,
    ratio_ptr,
    generated,
    sums,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    FORM: tl.constexpr,
):
    """Store the ratios of the slots of which a token is listed, `OPEN` for others; return the sums of their terms.

    Returns:
        Sums of the terms, of the teacher's mass and of the gradient's (`terms_of`), which entries have a slot, what the
        other slots have on the student's side, whether there is one, and whether one is of tokens that end here.
    """
    slot, slots, slot_class_ptr, segment_ptr, sums_ptr = node_slots
    kl = tl.zeros((TILE,), dtype=tl.float32)
    mass = tl.zeros((TILE,), dtype=tl.float32)
    kept = tl.zeros((TILE,), dtype=tl.float32)
    others = tl.zeros((TILE,), dtype=tl.float32)
    some = tl.zeros((TILE,), dtype=tl.int32)
    ending = tl.zeros((TILE,), dtype=tl.int32)
    named = tl.zeros((LANES,), dtype=tl.int32)
    # A tile of slots against all entries of the row: a node has few slots or thousands, a row at most LANES entries.
    for begin in range(0, slots, TILE):
        k = begin + tl.arange(0, TILE)
        there = k < slots
        cls = tl.load(slot_class_ptr + slot + k, mask=there, other=-1)
        q = slot_sums(k, slot, slots, segment_ptr, sums_ptr)
        # [TILE, LANES]: slots with the row's entries, several of which can have one class.
        of_slot = (cls[:, None] == classes[None, :]) & (cls >= 0)[:, None]
        p = tl.sum(tl.where(of_slot, mass_of[None, :], 0.0), axis=1)
        # [LANES]: entries whose class some slot has; the mass of the others belongs to no slot with a class.
        named = tl.maximum(named, tl.max(of_slot.to(tl.int32), axis=0))
        open_ = there & (p == 0.0)  # tokens that end here have no class
        others += tl.where(open_, q, 0.0)
        some = tl.maximum(some, open_.to(tl.int32))
        ending = tl.maximum(ending, (there & (cls < 0)).to(tl.int32))
        if FORM != 0.0:
            q = tl.where(open_, 0.0, q)
        term, of_mass, ratio = terms_of(p, q, generated, sums, FORM)
        kl += term
        mass += p
        kept += of_mass
        tl.store(ratio_ptr + k, tl.where(open_, OPEN, ratio), mask=there)  # see `replace_open`
    return (
        tl.sum(kl, axis=0),
        tl.sum(mass, axis=0),
        tl.sum(kept, axis=0),
        named,
        tl.sum(others, axis=0),
        tl.max(some, axis=0),
        tl.max(ending, axis=0),
    )


@triton.jit
def replace_open(ratio_ptr, slots, ratio, SLOTS: tl.constexpr):
    """Store the ratio of the slots that are taken together."""
    for begin in range(0, slots, SLOTS):
        k = begin + tl.arange(0, SLOTS)
        stored_ratio = tl.load(ratio_ptr + k, mask=k < slots, other=0.0)
        tl.store(ratio_ptr + k, tl.where(stored_ratio == OPEN, ratio, stored_ratio), mask=k < slots)


@triton.jit(do_not_specialize=["E", "T_s"])
def chain_listed_inside_kernel(
    student_ptr,
    class_ptr,
    log_prob_ptr,
    tail_ptr,
    chunk_ptr,
    s_row_ptr,
    t_row_ptr,
    node_ptr,
    slot_start_ptr,
    slot_class_ptr,
    segment_ptr,
    start_ptr,
    member_ptr,
    sums_ptr,
    capacity,
    value_ptr,
    mass_ptr,
    lse_ptr,
    listed_ptr,
    ratio_ptr,
    generated_ptr,
    most_slots,
    E,
    T_s,
    stride_b,
    stride_t,
    scale,
    K,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    FORM: tl.constexpr,
):
    """Compute the divergence of one node inside a token of the student after the other."""
    FIRST: tl.constexpr = SUMS if FORM != 0.0 else FORM
    sums_ptr += tl.program_id(0).to(tl.int64) * capacity
    j = tl.arange(0, LANES)
    for event in range(tl.program_id(0), E, tl.num_programs(0)):
        if tl.load(chunk_ptr + event) >= 0:
            node, row = tl.load(node_ptr + event), tl.load(t_row_ptr + event).to(tl.int64)
            slot = tl.load(slot_start_ptr + node)
            slots = tl.load(slot_start_ptr + node + 1) - slot
            s_row = tl.load(s_row_ptr + event)
            generated = is_generated(generated_ptr, s_row, FORM)
            base = row_of(student_ptr, s_row, T_s, stride_b, stride_t)
            first = tl.load(start_ptr + tl.load(segment_ptr + slot))
            last = tl.load(start_ptr + tl.load(segment_ptr + slot + slots))
            held_lse = member_log_sum(base, member_ptr, first, last, scale, SLOTS)
            store_segment_sums(
                base, segment_ptr, start_ptr, member_ptr, slot, slots, scale, held_lse, 1.0, sums_ptr, SLOTS
            )
            # -2 for lanes beyond K: -1 is the class of tokens that end here.
            classes = tl.load(class_ptr + row * K + j, mask=j < K, other=-2)
            listed = exp(tl.load(log_prob_ptr + row * K + j, mask=j < K, other=float("-inf")))
            tail = tl.load(tail_ptr + row)
            ratio = ratio_ptr + in_64_bits(event) * most_slots
            tl.debug_barrier()
            node_slots = slot, slots, slot_class_ptr, segment_ptr, sums_ptr
            sums = 0.0, 0.0, 0.0
            kl, mass, kept, named, others, some, ending = compare_named(
                node_slots, classes, listed, ratio, generated, sums, TILE, LANES, FIRST
            )
            tl.debug_barrier()
            # What no slot names has ended this token, where that is a slot; the tail may be in any slot that is open.
            unnamed = tl.sum(tl.where(named != 0, 0.0, listed), axis=0)
            p = tl.where(ending != 0, unnamed, 0.0) + tl.where(some != 0, tail, 0.0)
            term, of_mass, of_others = terms_of(p, others, generated, sums, FIRST)
            kl += term
            mass += p
            kept += of_mass
            reach = kept
            if FORM != 0.0:
                # Terms of generated text need the sums: the slots are compared again, and their ratios replaced.
                sums = mass, reach, kl
                kl, mass, kept, named, others, some, ending = compare_named(
                    node_slots, classes, listed, ratio, generated, sums, TILE, LANES, FORM
                )
                term, of_mass, of_others = terms_of(p, others, generated, sums, FORM)
                kl += term
                mass += p
                kept += of_mass
                tl.debug_barrier()
            replace_open(ratio, slots, of_others, SLOTS)
            tl.debug_barrier()
            tl.store(value_ptr + event, value_of(kl, mass, generated, reach, FORM))
            tl.store(mass_ptr + event, kept)
            tl.store(lse_ptr + event, held_lse)
            tl.store(listed_ptr + event, 1.0 - tail)


@triton.jit
def entries_of_node(
    id_ptr,
    log_prob_ptr,
    spelling_start_ptr,
    spelled_node_ptr,
    spelled_slot_ptr,
    rank,
    node,
    slot,
    V,
    K,
    LANES: tl.constexpr,
):
    """Return the slots of a row's entries that a node holds, -1 for others, and the logarithms of their mass."""
    j = tl.arange(0, LANES)
    token = tl.load(id_ptr + j, mask=j < K, other=V)
    log_p = tl.load(log_prob_ptr + j, mask=j < K, other=float("-inf"))
    known = (token < V) & (log_p > float("-inf"))
    token = tl.where(known, token, 0)
    # The node holds an entry if the piece of its spelling at the node's depth reaches it.
    spelled = tl.load(spelling_start_ptr + token) + rank
    held = known & (spelled < tl.load(spelling_start_ptr + token + 1))
    held = held & (tl.load(spelled_node_ptr + spelled, mask=held, other=-1) == node)
    of_slot = tl.load(spelled_slot_ptr + spelled, mask=held, other=0) - slot
    return tl.where(held, of_slot, -1), tl.where(held, log_p, float("-inf"))


@triton.jit
def held_sums(k, slot, slots, segment_ptr, start_ptr, of_slot, weight, of_unlisted):
    """Return the teacher's weight of some of a node's slots: of its entries, and of the tokens that are not listed."""
    first = tl.load(start_ptr + tl.load(segment_ptr + slot + k, mask=k < slots, other=0))
    last = tl.load(start_ptr + tl.load(segment_ptr + slot + k + 1, mask=k < slots, other=0))
    here = k[:, None] == of_slot[None, :]
    # A slot's tokens less those that are listed; each of them has an equal part of the tail.
    unlisted = last - first - tl.sum(here.to(tl.int32), axis=1)
    return tl.sum(tl.where(here, weight[None, :], 0.0), axis=1) + unlisted.to(tl.float32) * of_unlisted


@triton.jit
def compare_held(node_slots, held_mass, ratio_ptr, generated, sums, TILE: tl.constexpr, FORM: tl.constexpr):
    """Store the ratios of the slots that name a class; return the sums of their terms, and the other slot.

    Returns:
        Sums of the terms, of the teacher's mass and of the gradient's (`terms_of`), what the classes have on the
        student's side, what the tokens that end here have on the teacher's, and their slot, -1 = none.
    """
    slot, slots, slot_class_ptr, segment_ptr, start_ptr, fresh_segment_ptr, fresh_sums_ptr = node_slots
    of_slot, weight, of_unlisted = held_mass
    kl = tl.zeros((TILE,), dtype=tl.float32)
    mass = tl.zeros((TILE,), dtype=tl.float32)
    kept = tl.zeros((TILE,), dtype=tl.float32)
    named = tl.zeros((TILE,), dtype=tl.float32)
    ending = tl.zeros((TILE,), dtype=tl.float32)
    ends_at = tl.full((TILE,), -1, dtype=tl.int32)
    for begin in range(0, slots, TILE):
        k = begin + tl.arange(0, TILE)
        there = k < slots
        cls = tl.load(slot_class_ptr + slot + k, mask=there, other=0)
        held = held_sums(k, slot, slots, segment_ptr, start_ptr, of_slot, weight, of_unlisted)
        # The teacher holds the node, the student is fresh.
        q = slot_sums(k, slot, slots, fresh_segment_ptr, fresh_sums_ptr)
        named += q
        ending += tl.where(there & (cls < 0), held, 0.0)
        ends_at = tl.where(cls < 0, k, ends_at)
        p = tl.where(there & (cls >= 0), held, 0.0)
        term, of_mass, ratio = terms_of(p, q, generated, sums, FORM)
        kl += term
        mass += p
        kept += of_mass
        tl.store(ratio_ptr + k, ratio, mask=there & (cls >= 0))
    return (
        tl.sum(kl, axis=0),
        tl.sum(mass, axis=0),
        tl.sum(kept, axis=0),
        tl.sum(named, axis=0),
        tl.sum(ending, axis=0),
        tl.max(ends_at, axis=0),
    )


@triton.jit(do_not_specialize=["E", "T_s"])
def chain_listed_beside_kernel(
    student_ptr,
    id_ptr,
    log_prob_ptr,
    part_ptr,
    chunk_ptr,
    s_row_ptr,
    t_row_ptr,
    node_ptr,
    first_ptr,
    slot_start_ptr,
    slot_class_ptr,
    segment_ptr,
    start_ptr,
    fresh_segment_ptr,
    fresh_start_ptr,
    fresh_token_ptr,
    spelling_start_ptr,
    spelled_node_ptr,
    spelled_slot_ptr,
    root_ptr,
    top_ptr,
    total_ptr,
    flag_ptr,
    sums_ptr,
    capacity,
    value_ptr,
    mass_ptr,
    level_ptr,
    listed_ptr,
    ratio_ptr,
    generated_ptr,
    most_slots,
    E,
    T_s,
    V,
    V_t,
    flags,
    stride_b,
    stride_t,
    scale,
    K,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    FORM: tl.constexpr,
):
    """Compute the divergence of one node inside a token of the teacher after the other."""
    FIRST: tl.constexpr = SUMS if FORM != 0.0 else FORM
    flag_ptr += tl.program_id(0).to(tl.int64) * flags
    sums_ptr += tl.program_id(0).to(tl.int64) * capacity
    for event in range(tl.program_id(0), E, tl.num_programs(0)):
        chunk = tl.load(chunk_ptr + event)
        if chunk >= 0:
            node, row = tl.load(node_ptr + event), tl.load(s_row_ptr + event)
            given = tl.load(t_row_ptr + event).to(tl.int64)
            slot = tl.load(slot_start_ptr + node)
            slots = tl.load(slot_start_ptr + node + 1) - slot
            base = row_of(student_ptr, row, T_s, stride_b, stride_t)
            top, total = tl.load(top_ptr + row), tl.load(total_ptr + row)
            store_segment_sums(
                base,
                fresh_segment_ptr,
                fresh_start_ptr,
                fresh_token_ptr,
                slot,
                slots,
                scale,
                top,
                1.0 / total,
                sums_ptr,
                SLOTS,
            )
            of_slot, log_p = entries_of_node(
                id_ptr + given * K,
                log_prob_ptr + given * K,
                spelling_start_ptr,
                spelled_node_ptr,
                spelled_slot_ptr,
                event - tl.load(first_ptr + chunk),
                node,
                slot,
                V_t,
                K,
                LANES,
            )
            first = tl.load(start_ptr + tl.load(segment_ptr + slot))
            last = tl.load(start_ptr + tl.load(segment_ptr + slot + slots))
            # The teacher's distribution over the node: entries, and an equal part of the tail for each other token.
            unlisted = (last - first - tl.sum((of_slot >= 0).to(tl.int32), axis=0)).to(tl.float32)
            part = tl.load(part_ptr + given)
            # Without an unlisted token the part must not raise the pivot above all entries.
            log_part = tl.where(unlisted > 0.0, floored_log(part), float("-inf"))
            pivot = finite(tl.maximum(tl.max(log_p, axis=0), log_part))
            norm = tl.sum(exp(log_p - pivot), axis=0) + unlisted * exp(log_part - pivot)
            listed = tl.sum(exp(log_p), axis=0)
            tl.store(listed_ptr + event, listed / tl.maximum(listed + unlisted * part, TINY))
            ratio = ratio_ptr + in_64_bits(event) * most_slots
            tl.debug_barrier()
            generated = is_generated(generated_ptr, row, FORM)
            node_slots = slot, slots, slot_class_ptr, segment_ptr, start_ptr, fresh_segment_ptr, sums_ptr
            held_mass = of_slot, exp(log_p - pivot) / norm, exp(log_part - pivot) / norm
            sums = 0.0, 0.0, 0.0
            kl, mass, kept, named, ending, ends_at = compare_held(
                node_slots, held_mass, ratio, generated, sums, TILE, FIRST
            )
            # A zero of the type that the branch below assigns: Triton wants one type on both ways.
            level = kept * 0.0
            if FORM != 0.0:
                rest = level
            tl.debug_barrier()
            if ends_at >= 0:
                # As in `chain_node_kernel`: a small rest is summed, since 1 - named would have no digits.
                q = 1.0 - named
                if q < SMALL_REST:
                    q = (
                        unnamed_sum(base, root_ptr, flag_ptr, slot_class_ptr, slot, slots, V, scale, top, BLOCK, SLOTS)
                        / total
                    )
                term, of_mass, level = terms_of(ending, q, generated, sums, FIRST)
                kl += term
                mass += ending
                kept += of_mass
                tl.store(ratio + ends_at, level)
                if FORM != 0.0:
                    rest = q
            reach = kept
            if FORM != 0.0:
                tl.debug_barrier()
                sums = mass, reach, kl
                kl, mass, kept, named, ending, ends_at = compare_held(
                    node_slots, held_mass, ratio, generated, sums, TILE, FORM
                )
                if ends_at >= 0:
                    term, of_mass, level = terms_of(ending, rest, generated, sums, FORM)
                    kl += term
                    mass += ending
                    kept += of_mass
                    tl.store(ratio + ends_at, level)
            tl.store(value_ptr + event, value_of(kl, mass, generated, reach, FORM))
            tl.store(mass_ptr + event, kept)
            # A token of an unnamed class has its probability times this as gradient (`node_of_row`).
            tl.store(level_ptr + event, kept - level)


@triton.jit
def least_listed(listed_ptr, chunk_ptr, first_ptr, size_ptr, events, chunk, there, least):
    """Return the least listed mass of one side's nodes of some chunks."""
    # [BLOCK] chunks at once, until the one with most positions is through: sums have one order, without atomics.
    first = tl.load(first_ptr + chunk, mask=there, other=0)
    size = tl.load(size_ptr + chunk, mask=there, other=0)
    for i in range(tl.max(size, axis=0)):
        event = first + i
        inside = there & (i < size) & (event < events)
        own = inside & (tl.load(chunk_ptr + event, mask=inside, other=-1) == chunk)
        least = tl.minimum(least, tl.load(listed_ptr + event, mask=own, other=1.0))
    return least


@triton.jit(do_not_specialize=["s_events", "t_events", "chunks"])
def chain_listed_part_kernel(
    chunk_ptr,
    start_ptr,
    s_value_ptr,
    s_listed_ptr,
    s_chunk_ptr,
    s_end_ptr,
    s_events,
    t_value_ptr,
    t_listed_ptr,
    t_chunk_ptr,
    t_end_ptr,
    t_events,
    s_first_ptr,
    s_size_ptr,
    t_first_ptr,
    t_size_ptr,
    parts_ptr,
    listed_ptr,
    chunks,
    BLOCK: tl.constexpr,
):
    """Compute each chunk's parts, and the least listed mass at its nodes."""
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = chunk < chunks
    starts = tl.load(chunk_ptr + chunk, mask=there, other=-1) >= 0
    inner = tl.zeros((BLOCK,), dtype=tl.float32)
    end = tl.zeros((BLOCK,), dtype=tl.float32)
    inner, end = add_nodes(
        s_value_ptr, s_chunk_ptr, s_end_ptr, t_first_ptr, t_size_ptr, s_events, chunk, there, inner, end
    )
    inner, end = add_nodes(
        t_value_ptr, t_chunk_ptr, t_end_ptr, s_first_ptr, s_size_ptr, t_events, chunk, there, inner, end
    )
    least = tl.full((BLOCK,), 1.0, dtype=tl.float32)
    least = least_listed(s_listed_ptr, s_chunk_ptr, t_first_ptr, t_size_ptr, s_events, chunk, there, least)
    least = least_listed(t_listed_ptr, t_chunk_ptr, s_first_ptr, s_size_ptr, t_events, chunk, there, least)
    tl.store(parts_ptr + chunk, tl.load(start_ptr + chunk, mask=starts, other=0.0), mask=there)
    tl.store(parts_ptr + chunks + chunk, inner, mask=there)
    tl.store(parts_ptr + 2 * chunks + chunk, end, mask=there)
    tl.store(listed_ptr + chunk, least, mask=there)
