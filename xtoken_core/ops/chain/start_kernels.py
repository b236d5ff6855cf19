"""The Triton kernels of the chain divergence at the starts of chunks, with cross-entropy; and live sets as bits."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

LOG_TINY = tl.constexpr(-87.33654475055310)
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def row_of(logits_ptr, row, T, stride_b, stride_t):
    """Return the first logit of a position of the flattened batch."""
    row = tl.program_id(0).to(tl.int64) * 0 + row  # 64 bits, also where a loop counts rows
    return logits_ptr + row // T * stride_b + row % T * stride_t


@triton.jit
def is_live(bits_ptr, x, there):
    """Return which tokens' bits are set; False where `there` is."""
    word = tl.load(bits_ptr + (x >> 5), mask=there, other=0)
    return ((word >> (x & 31)) & 1) != 0


@triton.jit
def added(running, total, z):
    """Add `exp z` to sums `total * exp running`, lane by lane."""
    highest = tl.maximum(running, z)
    pivot = tl.where(highest == float("-inf"), 0.0, highest)
    return highest, total * tl.exp(running - pivot) + tl.exp(z - pivot)


@triton.jit
def log_of_sums(running, total):
    """Return the logarithm of the sum over lanes."""
    top = tl.max(running, axis=0)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    return tl.log(tl.sum(total * tl.exp(running - pivot), axis=0)) + pivot


@triton.jit
def xlogx(p):
    """Return `p log p`, 0 for 0."""
    return tl.where(p > 0.0, p * tl.log(tl.where(p > 0.0, p, 1.0)), 0.0)


@triton.jit
def floored_log(q):
    """Return `log q`, that of the smallest normal number for smaller ones."""
    return tl.log(tl.maximum(q, TINY))


@triton.jit
def segment_sums(
    base, scale, lse, bits_ptr, wide_ptr, rows, member_ptr, offset_ptr, height_ptr, slices, sums_ptr,
    MASKED: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr, SLICE: tl.constexpr
):  # fmt: skip
    """Store the probability of every segment of classes that are not plain; -1 where no member is live."""
    for begin in range(0, rows, ROWS):
        row = begin + tl.arange(0, ROWS)
        y = tl.load(wide_ptr + row[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :])
        inside = y >= 0
        if MASKED:
            inside = inside & is_live(bits_ptr, y, inside)
        values = tl.load(base + y, mask=inside, other=float("-inf")).to(tl.float32) * scale
        sums = tl.sum(tl.where(inside, tl.exp(values - lse), 0.0), axis=1)
        tl.store(sums_ptr + row, tl.where(tl.max(inside.to(tl.int32), axis=1) > 0, sums, -1.0))
    lanes = tl.arange(0, SLICE)
    for k in range(slices):
        from_ptr = member_ptr + tl.load(offset_ptr + k)
        total = tl.zeros((SLICE,), dtype=tl.float32)
        reached = tl.zeros((SLICE,), dtype=tl.int32)
        for j in range(tl.load(height_ptr + k)):
            x = tl.load(from_ptr + j * SLICE + lanes)
            there = x >= 0
            if MASKED:
                there = there & is_live(bits_ptr, x, there)
            z = tl.load(base + x, mask=there, other=float("-inf")).to(tl.float32) * scale
            total += tl.where(there, tl.exp(z - lse), 0.0)
            reached = reached | there.to(tl.int32)
        tl.store(sums_ptr + rows + k * SLICE + lanes, tl.where(reached > 0, total, -1.0))


@triton.jit
def class_totals(sums_ptr, index_ptr, start_ptr, count_ptr, m, there):
    """Return the probability of classes that are not plain, and 1 where a member is live."""
    start = tl.load(start_ptr + m, mask=there, other=0)
    count = tl.load(count_ptr + m, mask=there, other=0)
    total = tl.zeros(m.shape, dtype=tl.float32)
    reached = tl.zeros(m.shape, dtype=tl.int32)
    for i in range(tl.max(count, axis=0)):
        at = tl.load(index_ptr + start + i, mask=i < count, other=0)
        value = tl.load(sums_ptr + at, mask=i < count, other=-1.0)
        total += tl.maximum(value, 0.0)
        reached = reached | (value >= 0.0).to(tl.int32)
    return total, reached


@triton.jit
def chain_live_kernel(
    before_ptr, token_ptr, chunk_ptr, at_cut_ptr, bits_ptr, base_ptr, heavy_ptr, stored_ptr, tail_ptr, head_ptr,
    joined_ptr, position_start_ptr, by_position_ptr, point_ptr, low_ptr, high_ptr, rule_start_ptr, tail_start_ptr,
    tail_count_ptr, right_ptr, heads, W, depth, WORDS: tl.constexpr, RULES: tl.constexpr,
    TOKENS: tl.constexpr
):  # fmt: skip
    """Set the bits of the tokens that can follow one event's last token of the other side."""
    event = tl.program_id(0)
    if tl.load(chunk_ptr + event) >= 0:
        own_ptr = bits_ptr + event.to(tl.int64) * W
        words = tl.arange(0, WORDS)
        w = tl.load(before_ptr + event)
        row = tl.load(heavy_ptr + w)
        tail = tl.load(tail_ptr + w)
        conditioned = tl.load(at_cut_ptr + event).to(tl.int32)
        for begin in range(0, W, WORDS):
            inside = begin + words < W
            from_ptr = base_ptr + tail.to(tl.int64) * W
            if row >= 0:
                from_ptr = stored_ptr + row.to(tl.int64) * W
            value = tl.load(from_ptr + begin + words, mask=begin + words < W * conditioned, other=-1)
            tl.store(own_ptr + begin + words, value, mask=inside)
        tl.debug_barrier()
        if (conditioned != 0) & (row < 0):
            at = w.to(tl.int32)
            start = tl.load(rule_start_ptr + w)
            count = tl.load(rule_start_ptr + w + 1) - start
            for _ in range(depth + 1):
                for begin in range(0, count, RULES):
                    rule = begin + tl.arange(0, RULES)
                    there = rule < count
                    rule = start + rule
                    point = tl.load(point_ptr + rule, mask=there, other=0)
                    low = tl.load(low_ptr + rule, mask=there, other=0)
                    high = tl.load(high_ptr + rule, mask=there, other=0)
                    clear(
                        own_ptr, point, point + 1, there, tail, position_start_ptr, by_position_ptr, head_ptr,
                        joined_ptr, heads, TOKENS
                    )  # fmt: skip
                    clear(
                        own_ptr, low, high, there, tail, position_start_ptr, by_position_ptr, head_ptr, joined_ptr,
                        heads, TOKENS
                    )  # fmt: skip
                known = tl.maximum(at, 0)
                start = tl.load(tail_start_ptr + known)
                count = tl.where(at >= 0, tl.load(tail_count_ptr + known), 0)
                at = tl.where(at >= 0, tl.load(right_ptr + known), -1)
        tl.debug_barrier()
        token = tl.load(token_ptr + event).to(tl.int32)  # the text's own token can follow: it does
        word = tl.load(own_ptr + (token >> 5))
        bit = tl.full((), 1, dtype=tl.int32) << (token & 31)
        tl.store(own_ptr + (token >> 5), word | bit)


@triton.jit
def clear(
    own_ptr,
    low,
    high,
    there,
    tail,
    position_start_ptr,
    by_position_ptr,
    head_ptr,
    joined_ptr,
    heads,
    TOKENS: tl.constexpr,
):
    """Clear the bits of the tokens in intervals of capacity where the model decides; the order does not matter."""
    first = tl.load(position_start_ptr + low, mask=there, other=0)
    last = tl.load(position_start_ptr + high, mask=there, other=0)
    for begin in range(0, tl.max(last - first, axis=0), TOKENS):
        at = first[:, None] + begin + tl.arange(0, TOKENS)[None, :]
        inside = at < last[:, None]
        x = tl.load(by_position_ptr + at, mask=inside, other=0)
        head = tl.load(head_ptr + x, mask=inside, other=0)
        joined = tl.load(joined_ptr + tail * heads + head, mask=inside, other=0) != 0
        bit = tl.full((1, 1), 1, dtype=tl.int32) << (x & 31)
        tl.atomic_and(own_ptr + (x >> 5), ~bit, mask=inside & joined, sem="relaxed")


@triton.jit
def chain_start_kernel(
    student_ptr, teacher_ptr, targets_ptr, event_ptr, teacher_row_ptr, student_bits_ptr, teacher_bits_ptr, partner_ptr,
    s_wide_ptr, s_rows, s_member_ptr, s_offset_ptr, s_height_ptr, s_slices, s_start_ptr, s_count_ptr,
    s_index_ptr,
    t_wide_ptr, t_rows, t_member_ptr, t_offset_ptr, t_height_ptr, t_slices, t_start_ptr, t_count_ptr,
    t_index_ptr,
    s_sums_ptr, t_sums_ptr, s_capacity, t_capacity, ratio_ptr,
    losses_ptr, hits_ptr, head_lse_ptr, value_ptr, mass_ptr, s_lse_ptr, t_lse_ptr,
    R, T_s, T_t, V_head, V_s, V_t, M, W_s, W_t, s_stride_b, s_stride_t, t_stride_b, t_stride_t, scale,
    TARGETS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr, SLICE: tl.constexpr
):  # fmt: skip
    """Compute one student row after the other: cross-entropy, and the KL by class where a chunk starts."""
    columns = tl.arange(0, BLOCK)
    own_s, own_t = s_sums_ptr + tl.program_id(0) * s_capacity, t_sums_ptr + tl.program_id(0) * t_capacity
    for row in range(tl.program_id(0), R, tl.num_programs(0)):
        base = row_of(student_ptr, row, T_s, s_stride_b, s_stride_t)
        event = tl.load(event_ptr + row)
        starts = event >= 0
        compared = tl.where(starts, V_s, 0)
        bits = student_bits_ptr + tl.maximum(event, 0).to(tl.int64) * W_s
        head_top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
        head_total = tl.zeros((BLOCK,), dtype=tl.float32)
        guess = tl.zeros((BLOCK,), dtype=tl.int32)
        top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for begin in range(0, V_head, BLOCK):
            x = begin + columns
            z = tl.load(base + x, mask=x < V_head, other=float("-inf")).to(tl.float32)
            if TARGETS:
                guess = tl.where(z > head_top, x, guess)
                head_top, head_total = added(head_top, head_total, z)
            live = is_live(bits, x, x < compared)
            top, total = added(top, total, tl.where(live, z * scale, float("-inf")))
        if TARGETS:
            head_lse = log_of_sums(head_top, head_total)
            target = tl.load(targets_ptr + row)
            best = tl.max(head_top, axis=0)
            first = tl.min(tl.where(head_top == best, guess, V_head), axis=0)
            tl.store(head_lse_ptr + row, head_lse)
            tl.store(losses_ptr + row, head_lse - tl.load(base + target).to(tl.float32))
            tl.store(hits_ptr + row, first.to(tl.int64) == target)
        if starts:
            s_lse = log_of_sums(top, total)
            segment_sums(
                base, scale, s_lse, bits, s_wide_ptr, s_rows, s_member_ptr, s_offset_ptr, s_height_ptr, s_slices, own_s,
                True, SEGMENT, ROWS, SLICE
            )  # fmt: skip
            t_base = row_of(teacher_ptr, tl.load(teacher_row_ptr + event), T_t, t_stride_b, t_stride_t)
            t_bits = teacher_bits_ptr + event.to(tl.int64) * W_t
            t_top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
            t_total = tl.zeros((BLOCK,), dtype=tl.float32)
            for begin in range(0, V_t, BLOCK):
                y = begin + columns
                live = is_live(t_bits, y, y < V_t)
                z = tl.load(t_base + y, mask=live, other=float("-inf")).to(tl.float32) * scale
                t_top, t_total = added(t_top, t_total, z)
            t_lse = log_of_sums(t_top, t_total)
            segment_sums(
                t_base, scale, t_lse, t_bits, t_wide_ptr, t_rows, t_member_ptr, t_offset_ptr, t_height_ptr, t_slices,
                own_t, True, SEGMENT, ROWS, SLICE
            )  # fmt: skip
            kl = tl.zeros((BLOCK,), dtype=tl.float32)
            mass = tl.zeros((BLOCK,), dtype=tl.float32)
            unclipped = tl.zeros((BLOCK,), dtype=tl.float32)
            for begin in range(0, V_s, BLOCK):
                x = begin + columns
                y = tl.load(partner_ptr + x, mask=x < V_s, other=-1)
                live = (y >= 0) & is_live(bits, x, y >= 0)
                t_live = live & is_live(t_bits, y, live)
                log_q = tl.load(base + x, mask=live, other=0.0).to(tl.float32) * scale - s_lse
                log_p = tl.load(t_base + y, mask=t_live, other=float("-inf")).to(tl.float32) * scale - t_lse
                p = tl.where(t_live, tl.exp(log_p), 0.0)
                kl += tl.where(p > 0.0, p * (tl.where(p > 0.0, log_p, 0.0) - tl.maximum(log_q, LOG_TINY)), 0.0)
                mass += p
                unclipped += tl.where(log_q >= LOG_TINY, p, 0.0)
            tl.debug_barrier()
            for begin in range(0, M, BLOCK):
                m = begin + columns
                there = m < M
                q, alive = class_totals(own_s, s_index_ptr, s_start_ptr, s_count_ptr, m, there)
                p, _ = class_totals(own_t, t_index_ptr, t_start_ptr, t_count_ptr, m, there)
                p = tl.where(alive > 0, p, 0.0)
                kl += xlogx(p) - p * floored_log(q)
                mass += p
                p = tl.where(q >= TINY, p, 0.0)
                unclipped += p
                ratio = p / tl.maximum(q, TINY)
                tl.store(ratio_ptr + event.to(tl.int64) * M + m, ratio.to(ratio_ptr.dtype.element_ty), mask=there)
            whole = tl.sum(mass, axis=0)
            tl.store(value_ptr + event, tl.sum(kl, axis=0) - xlogx(whole))
            tl.store(mass_ptr + event, tl.sum(unclipped, axis=0))
            tl.store(s_lse_ptr + event, s_lse)
            tl.store(t_lse_ptr + event, t_lse)
            tl.debug_barrier()  # the sums are overwritten by the next row


@triton.jit
def chain_start_bwd_kernel(
    student_ptr, teacher_ptr, targets_ptr, event_ptr, teacher_row_ptr, student_bits_ptr, teacher_bits_ptr, partner_ptr,
    ratio_ptr, head_lse_ptr, mass_ptr, s_lse_ptr, t_lse_ptr, of_losses_ptr, of_values_ptr, grad_ptr,
    T_s, T_t, V_head, V_s, M, W_s, W_t, s_stride_b, s_stride_t, t_stride_b, t_stride_t, scale,
    TARGETS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute one block of a student row's gradient: that of its cross-entropy and of the start of its chunk."""
    row = tl.program_id(0)
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = x < V_head
    base = row_of(student_ptr, row, T_s, s_stride_b, s_stride_t)
    event = tl.load(event_ptr + row)
    of_value = tl.load(of_values_ptr + event, mask=event >= 0, other=0.0)
    of_loss = 0.0
    if TARGETS:
        of_loss = tl.load(of_losses_ptr + row)
    gradient = tl.zeros((BLOCK,), dtype=tl.float32)
    if (of_value != 0.0) | (of_loss != 0.0):
        z = tl.load(base + x, mask=inside, other=float("-inf")).to(tl.float32)
        if TARGETS:
            hit = (x == tl.load(targets_ptr + row)).to(tl.float32)
            gradient = (tl.exp(z - tl.load(head_lse_ptr + row)) - hit) * of_loss
        if of_value != 0.0:
            t_base = row_of(teacher_ptr, tl.load(teacher_row_ptr + event), T_t, t_stride_b, t_stride_t)
            live = is_live(student_bits_ptr + event.to(tl.int64) * W_s, x, x < V_s)
            y = tl.load(partner_ptr + x, mask=live, other=0)
            log_q = z * scale - tl.load(s_lse_ptr + event)
            q = tl.where(live, tl.exp(log_q), 0.0)
            plain = live & (y >= 0)
            t_live = plain & is_live(teacher_bits_ptr + event.to(tl.int64) * W_t, y, plain) & (log_q >= LOG_TINY)
            log_p = tl.load(t_base + y, mask=t_live, other=float("-inf")).to(tl.float32) * scale
            p = tl.where(t_live, tl.exp(log_p - tl.load(t_lse_ptr + event)), 0.0)
            at = ratio_ptr + event.to(tl.int64) * M - 1 - y
            ratio = tl.load(at, mask=live & (y < 0), other=0.0).to(tl.float32)
            gradient += of_value * scale * (q * (tl.load(mass_ptr + event) - ratio) - p)
    own = grad_ptr + row.to(tl.int64) * V_head
    tl.store(own + x, gradient.to(grad_ptr.dtype.element_ty), mask=inside)
