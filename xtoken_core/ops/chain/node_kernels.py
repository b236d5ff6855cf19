"""The Triton kernels of the chain divergence at nodes inside tokens of one side, the holder; the other one is fresh."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.chain.start_kernels import (
    TINY,
    added,
    class_totals,
    floored_log,
    log_of_sums,
    row_of,
    segment_sums,
    xlogx,
)


@triton.jit
def marked(flag_ptr, slot_class_ptr, slot, slots, SET: tl.constexpr, SLOTS: tl.constexpr):
    """Set the marks of a node's classes to the numbers of their slots, from 1, or back to 0."""
    for begin in range(0, slots, SLOTS):
        k = begin + tl.arange(0, SLOTS)
        cls = tl.load(slot_class_ptr + slot + k, mask=k < slots, other=-1)
        value = k + 1 if SET else k * 0
        tl.store(flag_ptr + cls, value.to(flag_ptr.dtype.element_ty), mask=cls >= 0)


@triton.jit
def fresh_segment_sums(
    base, scale, lse, slot, slots, slot_class_ptr, lookup_ptr, wide_ptr, rows, member_ptr, offset_ptr, height_ptr,
    slices, start_ptr, count_ptr, index_ptr, token_start_ptr, token_ptr, sums_ptr, FEW: tl.constexpr,
    SLOTS: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr, SLICE: tl.constexpr
):  # fmt: skip
    """Store the sums that a node's slots read: class by class if they are few, else those of all classes."""
    if slots <= FEW:
        for k in range(slots):
            cls = tl.load(slot_class_ptr + slot + k)
            if cls >= 0:
                code = tl.load(lookup_ptr + cls)
                if code < 0:
                    m = -1 - code
                    first, last = tl.load(token_start_ptr + m), tl.load(token_start_ptr + m + 1)
                    total = tl.zeros((SLOTS,), dtype=tl.float32)
                    for begin in range(first, last, SLOTS):
                        at = begin + tl.arange(0, SLOTS)
                        x = tl.load(token_ptr + at, mask=at < last, other=0)
                        z = tl.load(base + x, mask=at < last, other=float("-inf")).to(tl.float32) * scale
                        total += tl.exp(z - lse)
                    start = tl.load(start_ptr + m)
                    tl.store(sums_ptr + tl.load(index_ptr + start), tl.sum(total, axis=0))
                    for i in range(1, tl.load(count_ptr + m)):
                        tl.store(sums_ptr + tl.load(index_ptr + start + i), -1.0)
    else:
        segment_sums(
            base, scale, lse, wide_ptr, wide_ptr, rows, member_ptr, offset_ptr, height_ptr, slices, sums_ptr, False,
            SEGMENT, ROWS, SLICE
        )  # fmt: skip


@triton.jit
def fresh_sums(base, root_ptr, flag_ptr, V, scale, BLOCK: tl.constexpr):
    """Return `log sum exp` of all logits of a row, and of those whose class has no flag."""
    columns = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    rest_top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    rest_total = tl.zeros((BLOCK,), dtype=tl.float32)
    for begin in range(0, V, BLOCK):
        x = begin + columns
        z = tl.load(base + x, mask=x < V, other=float("-inf")).to(tl.float32) * scale
        cls = tl.load(root_ptr + x, mask=x < V, other=0)
        named = tl.load(flag_ptr + cls, mask=x < V, other=1) != 0
        top, total = added(top, total, z)
        rest_top, rest_total = added(rest_top, rest_total, tl.where(named, float("-inf"), z))
    return log_of_sums(top, total), log_of_sums(rest_top, rest_total)


@triton.jit
def member_log_sum(base, member_ptr, first, last, scale, BLOCK: tl.constexpr):
    """Return `log sum exp` of a node's tokens, 0 if all are -inf."""
    top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for begin in range(first, last, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(member_ptr + at, mask=at < last, other=0)
        z = tl.load(base + x, mask=at < last, other=float("-inf")).to(tl.float32) * scale
        top, total = added(top, total, z)
    lse = log_of_sums(top, total)
    return tl.where(lse == float("-inf"), 0.0, lse)


@triton.jit
def node_sums(base, member_ptr, member_start_ptr, first, last, scale, lse, sums_ptr, SLOTS: tl.constexpr):
    """Store the probability of every segment of a node's slots among its tokens."""
    for begin in range(first, last, SLOTS):
        segment = begin + tl.arange(0, SLOTS)
        there = segment < last
        start = tl.load(member_start_ptr + segment, mask=there, other=0)
        count = tl.load(member_start_ptr + segment + 1, mask=there, other=0) - start
        total = tl.zeros((SLOTS,), dtype=tl.float32)
        for j in range(tl.max(count, axis=0)):
            x = tl.load(member_ptr + start + j, mask=j < count, other=0)
            z = tl.load(base + x, mask=j < count, other=float("-inf")).to(tl.float32) * scale
            total += tl.exp(z - lse)
        tl.store(sums_ptr + segment - first, total, mask=there)


@triton.jit
def slot_values(
    slot, there, slot_class_ptr, segment_start_ptr, node_sums_ptr, first, base, scale, lse, rest, lookup_ptr,
    sums_ptr, index_ptr, start_ptr, count_ptr
):  # fmt: skip
    """Return the classes of slots and their probabilities on the holder's and on the fresh side."""
    cls = tl.load(slot_class_ptr + slot, mask=there, other=-1)
    segment = tl.load(segment_start_ptr + slot, mask=there, other=0)
    count = tl.load(segment_start_ptr + slot + 1, mask=there, other=0) - segment
    held = tl.zeros(slot.shape, dtype=tl.float32)
    for i in range(tl.max(count, axis=0)):
        held += tl.load(node_sums_ptr + segment + i - first, mask=i < count, other=0.0)
    named = there & (cls >= 0)
    token = tl.load(lookup_ptr + cls, mask=named, other=0)
    plain, other = named & (token >= 0), named & (token < 0)
    z = tl.load(base + token, mask=plain, other=float("-inf")).to(tl.float32) * scale
    total, _ = class_totals(sums_ptr, index_ptr, start_ptr, count_ptr, tl.where(other, -1 - token, 0), other)
    fresh = tl.where(plain, tl.exp(z - lse), 0.0) + total
    return cls, held, tl.where(there & (cls < 0), rest, fresh)


@triton.jit
def chain_node_kernel(
    holder_ptr, fresh_ptr, order_ptr, count_ptr, holder_row_ptr, fresh_row_ptr, node_ptr,
    slot_start_ptr, slot_class_ptr, segment_start_ptr, member_start_ptr, member_ptr,
    root_ptr, lookup_ptr, wide_ptr, rows, c_member_ptr, c_offset_ptr, c_height_ptr, c_slices, c_start_ptr, c_count_ptr,
    c_index_ptr, c_token_start_ptr, c_token_ptr,
    flag_ptr, sums_ptr, node_sums_ptr, capacity, node_capacity,
    value_ptr, mass_ptr, held_lse_ptr, fresh_lse_ptr, rest_ptr,
    T_h, T_f, V_f, C, h_stride_b, h_stride_t, f_stride_b, f_stride_t, scale,
    HOLDER_LEARNS: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr, SLOTS: tl.constexpr,
    FEW: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Compute the KL of one node after the other."""
    program = tl.program_id(0).to(tl.int64)
    flag_ptr += program * (C + 1)
    sums_ptr += program * capacity
    node_sums_ptr += program * node_capacity
    for i in range(tl.program_id(0), tl.load(count_ptr), tl.num_programs(0)):
        event = tl.load(order_ptr + i)
        if event >= 0:
            node = tl.load(node_ptr + event)
            slot = tl.load(slot_start_ptr + node)
            slots = tl.load(slot_start_ptr + node + 1) - slot
            holder = row_of(holder_ptr, tl.load(holder_row_ptr + event), T_h, h_stride_b, h_stride_t)
            fresh = row_of(fresh_ptr, tl.load(fresh_row_ptr + event), T_f, f_stride_b, f_stride_t)
            marked(flag_ptr, slot_class_ptr, slot, slots, True, SLOTS)
            tl.debug_barrier()
            lse, rest_lse = fresh_sums(fresh, root_ptr, flag_ptr, V_f, scale, BLOCK)
            rest = tl.exp(rest_lse - lse)
            fresh_segment_sums(
                fresh, scale, lse, slot, slots, slot_class_ptr, lookup_ptr, wide_ptr, rows, c_member_ptr, c_offset_ptr,
                c_height_ptr, c_slices, c_start_ptr, c_count_ptr, c_index_ptr, c_token_start_ptr, c_token_ptr, sums_ptr,
                FEW, SLOTS, SEGMENT, ROWS, SLICE
            )  # fmt: skip
            first, last = tl.load(segment_start_ptr + slot), tl.load(segment_start_ptr + slot + slots)
            members, end = tl.load(member_start_ptr + first), tl.load(member_start_ptr + last)
            held_lse = member_log_sum(holder, member_ptr, members, end, scale, SLOTS)
            node_sums(holder, member_ptr, member_start_ptr, first, last, scale, held_lse, node_sums_ptr, SLOTS)
            tl.debug_barrier()
            kl = tl.zeros((SLOTS,), dtype=tl.float32)
            mass = tl.zeros((SLOTS,), dtype=tl.float32)
            unclipped = tl.zeros((SLOTS,), dtype=tl.float32)
            for begin in range(0, slots, SLOTS):
                k = begin + tl.arange(0, SLOTS)
                _, q, p = slot_values(
                    slot + k, k < slots, slot_class_ptr, segment_start_ptr, node_sums_ptr, first, fresh, scale, lse,
                    rest, lookup_ptr, sums_ptr, c_index_ptr, c_start_ptr, c_count_ptr
                )  # fmt: skip
                if not HOLDER_LEARNS:
                    p, q = q, p
                kl += xlogx(p) - p * floored_log(q)
                mass += p
                unclipped += tl.where(q >= TINY, p, 0.0)
            tl.store(value_ptr + event, tl.sum(kl, axis=0) - xlogx(tl.sum(mass, axis=0)))
            tl.store(mass_ptr + event, tl.sum(unclipped, axis=0))
            tl.store(held_lse_ptr + event, held_lse)
            tl.store(fresh_lse_ptr + event, lse)
            tl.store(rest_ptr + event, rest)
            marked(flag_ptr, slot_class_ptr, slot, slots, False, SLOTS)
            tl.debug_barrier()


@triton.jit
def chain_holder_bwd_kernel(
    holder_ptr, fresh_ptr, grad_ptr, chunk_ptr, first_ptr, size_ptr, holder_row_ptr, fresh_row_ptr, node_ptr,
    slot_start_ptr, slot_class_ptr, segment_start_ptr, member_start_ptr, member_ptr, member_slot_ptr,
    lookup_ptr, wide_ptr, rows, c_member_ptr, c_offset_ptr, c_height_ptr, c_slices, c_start_ptr, c_count_ptr,
    c_index_ptr, c_token_start_ptr, c_token_ptr,
    ratio_ptr, sums_ptr, node_sums_ptr, capacity, node_capacity, ratio_capacity,
    mass_ptr, held_lse_ptr, fresh_lse_ptr, rest_ptr, of_values_ptr,
    chunks, E, T_h, T_f, V_head, h_stride_b, h_stride_t, f_stride_b, f_stride_t, scale,
    SLICE: tl.constexpr, SLOTS: tl.constexpr, FEW: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Add the gradients of the nodes inside the student's token of a chunk to its row, one node after the other."""
    program = tl.program_id(0).to(tl.int64)
    sums_ptr += program * capacity
    node_sums_ptr += program * node_capacity
    ratio_ptr += program * ratio_capacity
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        position = tl.load(first_ptr + chunk)
        for event in range(position, tl.minimum(position + tl.load(size_ptr + chunk), E)):
            if tl.load(chunk_ptr + event) == chunk:
                of_value = tl.load(of_values_ptr + event)
                node = tl.load(node_ptr + event)
                slot = tl.load(slot_start_ptr + node)
                slots = tl.load(slot_start_ptr + node + 1) - slot
                row = tl.load(holder_row_ptr + event)
                holder = row_of(holder_ptr, row, T_h, h_stride_b, h_stride_t)
                fresh = row_of(fresh_ptr, tl.load(fresh_row_ptr + event), T_f, f_stride_b, f_stride_t)
                lse, held_lse = tl.load(fresh_lse_ptr + event), tl.load(held_lse_ptr + event)
                fresh_segment_sums(
                    fresh, scale, lse, slot, slots, slot_class_ptr, lookup_ptr, wide_ptr, rows, c_member_ptr,
                    c_offset_ptr, c_height_ptr, c_slices, c_start_ptr, c_count_ptr, c_index_ptr, c_token_start_ptr,
                    c_token_ptr, sums_ptr, FEW, SLOTS, SEGMENT, ROWS, SLICE
                )  # fmt: skip
                first, last = tl.load(segment_start_ptr + slot), tl.load(segment_start_ptr + slot + slots)
                members, end = tl.load(member_start_ptr + first), tl.load(member_start_ptr + last)
                node_sums(holder, member_ptr, member_start_ptr, first, last, scale, held_lse, node_sums_ptr, SLOTS)
                tl.debug_barrier()
                for begin in range(0, slots, SLOTS):
                    k = begin + tl.arange(0, SLOTS)
                    _, q, p = slot_values(
                        slot + k, k < slots, slot_class_ptr, segment_start_ptr, node_sums_ptr, first, fresh, scale,
                        lse, tl.load(rest_ptr + event), lookup_ptr, sums_ptr, c_index_ptr, c_start_ptr, c_count_ptr
                    )  # fmt: skip
                    ratio = tl.where(q >= TINY, p / tl.maximum(q, TINY), 0.0)
                    tl.store(ratio_ptr + k, ratio, mask=k < slots)
                tl.debug_barrier()
                mass = tl.load(mass_ptr + event)
                own = grad_ptr + row.to(tl.int64) * V_head
                for begin in range(members, end, SLOTS):
                    at = begin + tl.arange(0, SLOTS)
                    there = at < end
                    x = tl.load(member_ptr + at, mask=there, other=0)
                    k = tl.load(member_slot_ptr + at, mask=there, other=0) - slot
                    z = tl.load(holder + x, mask=there, other=float("-inf")).to(tl.float32) * scale
                    slope = tl.exp(z - held_lse) * (mass - tl.load(ratio_ptr + k, mask=there, other=0.0))
                    before = tl.load(own + x, mask=there, other=0.0).to(tl.float32)
                    after = before + of_value * scale * slope
                    tl.store(own + x, after.to(grad_ptr.dtype.element_ty), mask=there)
                tl.debug_barrier()


@triton.jit
def chain_fresh_bwd_kernel(
    holder_ptr, fresh_ptr, grad_ptr, order_ptr, count_ptr, holder_row_ptr, fresh_row_ptr, node_ptr,
    slot_start_ptr, slot_class_ptr, segment_start_ptr, member_start_ptr, member_ptr,
    root_ptr, lookup_ptr, wide_ptr, rows, c_member_ptr, c_offset_ptr, c_height_ptr, c_slices, c_start_ptr, c_count_ptr,
    c_index_ptr, c_token_start_ptr, c_token_ptr,
    flag_ptr, ratio_ptr, sums_ptr, node_sums_ptr, capacity, node_capacity, ratio_capacity,
    mass_ptr, held_lse_ptr, fresh_lse_ptr, rest_ptr, of_values_ptr,
    T_h, T_f, V_f, V_head, C, h_stride_b, h_stride_t, f_stride_b, f_stride_t, scale,
    BLOCK: tl.constexpr, SLICE: tl.constexpr, SLOTS: tl.constexpr,
    FEW: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Add the gradient of one node inside a token of the teacher after the other; no two have the same row."""
    program = tl.program_id(0).to(tl.int64)
    flag_ptr += program * (C + 1)
    ratio_ptr += program * ratio_capacity
    sums_ptr += program * capacity
    node_sums_ptr += program * node_capacity
    for i in range(tl.program_id(0), tl.load(count_ptr), tl.num_programs(0)):
        event = tl.load(order_ptr + i)
        if event >= 0:
            of_value = tl.load(of_values_ptr + event)
            node = tl.load(node_ptr + event)
            slot = tl.load(slot_start_ptr + node)
            slots = tl.load(slot_start_ptr + node + 1) - slot
            row = tl.load(fresh_row_ptr + event)
            holder = row_of(holder_ptr, tl.load(holder_row_ptr + event), T_h, h_stride_b, h_stride_t)
            fresh = row_of(fresh_ptr, row, T_f, f_stride_b, f_stride_t)
            lse, held_lse = tl.load(fresh_lse_ptr + event), tl.load(held_lse_ptr + event)
            marked(flag_ptr, slot_class_ptr, slot, slots, True, SLOTS)
            fresh_segment_sums(
                fresh, scale, lse, slot, slots, slot_class_ptr, lookup_ptr, wide_ptr, rows, c_member_ptr, c_offset_ptr,
                c_height_ptr, c_slices, c_start_ptr, c_count_ptr, c_index_ptr, c_token_start_ptr, c_token_ptr, sums_ptr,
                FEW, SLOTS, SEGMENT, ROWS, SLICE
            )  # fmt: skip
            first, last = tl.load(segment_start_ptr + slot), tl.load(segment_start_ptr + slot + slots)
            node_sums(holder, member_ptr, member_start_ptr, first, last, scale, held_lse, node_sums_ptr, SLOTS)
            tl.debug_barrier()
            of_rest = tl.zeros((SLOTS,), dtype=tl.float32)
            for begin in range(0, slots, SLOTS):
                k = begin + tl.arange(0, SLOTS)
                cls, p, q = slot_values(
                    slot + k, k < slots, slot_class_ptr, segment_start_ptr, node_sums_ptr, first, fresh, scale, lse,
                    tl.load(rest_ptr + event), lookup_ptr, sums_ptr, c_index_ptr, c_start_ptr, c_count_ptr
                )  # fmt: skip
                ratio = tl.where(q >= TINY, p / tl.maximum(q, TINY), 0.0)
                tl.store(ratio_ptr + k, ratio, mask=k < slots)
                of_rest += tl.where((k < slots) & (cls < 0), ratio, 0.0)
            tl.debug_barrier()
            mass, rest_ratio = tl.load(mass_ptr + event), tl.sum(of_rest, axis=0)
            own = grad_ptr + row.to(tl.int64) * V_head
            for begin in range(0, V_f, BLOCK):
                x = begin + tl.arange(0, BLOCK)
                there = x < V_f
                z = tl.load(fresh + x, mask=there, other=float("-inf")).to(tl.float32) * scale
                cls = tl.load(root_ptr + x, mask=there, other=0)
                number = tl.load(flag_ptr + cls, mask=there, other=0).to(tl.int32)
                ratio = tl.load(ratio_ptr + number - 1, mask=number > 0, other=0.0)
                ratio = tl.where(number > 0, ratio, rest_ratio)
                before = tl.load(own + x, mask=there, other=0.0).to(tl.float32)
                after = before + of_value * scale * tl.exp(z - lse) * (mass - ratio)
                tl.store(own + x, after.to(grad_ptr.dtype.element_ty), mask=there)
            tl.debug_barrier()
            marked(flag_ptr, slot_class_ptr, slot, slots, False, SLOTS)
            tl.debug_barrier()


@triton.jit
def chain_node_sums_kernel(
    s_value_ptr, s_chunk_ptr, s_end_ptr, s_first_ptr, s_size_ptr, s_events,
    t_value_ptr, t_chunk_ptr, t_end_ptr, t_first_ptr, t_size_ptr, t_events, sums_ptr, chunks, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute each chunk's sums over its nodes inside tokens, and after its last token."""
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = chunk < chunks
    inner = tl.zeros((BLOCK,), dtype=tl.float32)
    end = tl.zeros((BLOCK,), dtype=tl.float32)
    inner, end = add_nodes(s_value_ptr, s_chunk_ptr, s_end_ptr, s_first_ptr, s_size_ptr, s_events, chunk, there, inner,
                           end)  # fmt: skip
    inner, end = add_nodes(t_value_ptr, t_chunk_ptr, t_end_ptr, t_first_ptr, t_size_ptr, t_events, chunk, there, inner,
                           end)  # fmt: skip
    tl.store(sums_ptr + chunk, inner, mask=there)
    tl.store(sums_ptr + chunks + chunk, end, mask=there)


@triton.jit
def add_nodes(value_ptr, chunk_ptr, end_ptr, first_ptr, size_ptr, events, chunk, there, inner, end):
    """Add the values of one side's nodes of some chunks."""
    first = tl.load(first_ptr + chunk, mask=there, other=0)
    size = tl.load(size_ptr + chunk, mask=there, other=0)
    for i in range(tl.max(size, axis=0)):
        event = first + i
        inside = there & (i < size) & (event < events)
        own = inside & (tl.load(chunk_ptr + event, mask=inside, other=-1) == chunk)
        value = tl.load(value_ptr + event, mask=own, other=0.0)
        at_end = tl.load(end_ptr + event, mask=own, other=0) != 0
        inner += tl.where(at_end, 0.0, value)
        end += tl.where(at_end, value, 0.0)
    return inner, end
