"""The Triton kernels of `p_kl`. Logits are read in tiles where they are; everything else lies token by token.

A buffer that is `K` or `V_s` high has one row per column or token id and the positions side by side, so that a
projection entry moves whole lines of neighbouring positions.
"""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.tile_kernels import (
    combined_log_sum_exp,
    combined_place_of_maximum,
    combined_sum,
    row_bases,
    store_tile_sums,
)

EPS = tl.constexpr(1e-10)
LOG_EPS = tl.constexpr(-23.025850929940457)


@triton.jit
def p_kl_slots_kernel(
    slot_targets_ptr, slot_weights_ptr, place_ptr, places_ptr, weights_ptr, counts_ptr, V, SLOTS, BLOCK: tl.constexpr
):
    """Of each student token's entries those whose teacher token is compared, moved to the front, and their number."""
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.zeros((BLOCK,), dtype=tl.int32)
    for slot in range(SLOTS):
        target = tl.load(slot_targets_ptr + slot * V + v, mask=v < V, other=-1)
        place = tl.load(place_ptr + target, mask=target >= 0, other=-1)
        weight = tl.load(slot_weights_ptr + slot * V + v, mask=place >= 0, other=0.0)
        tl.store(places_ptr + kept * V + v, place, mask=place >= 0)
        tl.store(weights_ptr + kept * V + v, weight, mask=place >= 0)
        kept += (place >= 0).to(tl.int32)
    for slot in range(SLOTS):
        tl.store(places_ptr + slot * V + v, tl.full((BLOCK,), -1, dtype=tl.int32), mask=(v < V) & (slot >= kept))
    tl.store(counts_ptr + v, kept, mask=v < V)


@triton.jit(do_not_specialize=["R", "T"])
def p_kl_student_kernel(
    logits_ptr, counts_ptr, transposed_ptr, top_ptr, total_ptr, head_top_ptr, head_total_ptr,
    R, T, V, V_head, stride_b, stride_t, padded, scale, HEAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """A tile of student logits: its sums, and a copy, positions side by side, of the ids that project into K."""
    part = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    v = part * COLUMNS + tl.arange(0, COLUMNS)
    base = row_bases(logits_ptr, rows, T, stride_b, stride_t)
    inside = (rows < R)[:, None] & (v < V_head)[None, :]
    raw = tl.load(base[:, None] + v[None, :], mask=inside, other=float("-inf"))
    needed = tl.load(counts_ptr + v, mask=v < V, other=0) > 0
    if tl.max(needed.to(tl.int32), axis=0) > 0:
        places = v[None, :] * padded + rows[:, None]
        tl.store(transposed_ptr + places, raw, mask=(rows < R)[:, None] & needed[None, :])
    x = raw.to(tl.float32)
    if HEAD:
        store_tile_sums(x, head_top_ptr, head_total_ptr, part * padded + rows)
    z = tl.where((v < V)[None, :], x, float("-inf")) * scale
    store_tile_sums(z, top_ptr, total_ptr, part * padded + rows)


@triton.jit(do_not_specialize=["R", "T"])
def p_kl_student_rows_kernel(
    logits_ptr, targets_ptr, top_ptr, total_ptr, head_top_ptr, head_total_ptr,
    lse_ptr, head_lse_ptr, losses_ptr, hits_ptr, R, T, V_head, parts, stride_b, stride_t, padded,
    TARGETS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Per student position: log-sum-exp; with targets the cross-entropy of the whole head and its first guess."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    _, lse = combined_log_sum_exp(top_ptr, total_ptr, rows, parts, padded, PARTS, ROWS)
    tl.store(lse_ptr + rows, lse)
    if TARGETS:
        top, head_lse = combined_log_sum_exp(head_top_ptr, head_total_ptr, rows, parts, padded, PARTS, ROWS)
        lanes = tl.arange(0, PARTS).to(tl.int64)
        tile = tl.full((PARTS, ROWS), 2147483647, dtype=tl.int64)
        for start in range(0, parts, PARTS):
            n = start + lanes
            places = n[:, None] * padded + rows[None, :]
            value = tl.load(head_top_ptr + places, mask=(n < parts)[:, None], other=float("nan"))
            tile = tl.minimum(tile, tl.where(value == top[None, :], n[:, None], 2147483647))
        base = row_bases(logits_ptr, rows, T, stride_b, stride_t)
        v = tl.min(tile, axis=0)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = (rows < R)[:, None] & (v < V_head)
        x = tl.load(base[:, None] + v, mask=inside, other=float("nan")).to(tl.float32)
        guess = tl.min(tl.where(x == top[:, None], v, 9223372036854775807), axis=1)
        target = tl.load(targets_ptr + rows, mask=rows < R, other=0)
        own = tl.load(base + target, mask=rows < R, other=0.0).to(tl.float32)
        tl.store(head_lse_ptr + rows, head_lse)
        tl.store(losses_ptr + rows, head_lse - own, mask=rows < R)
        tl.store(hits_ptr + rows, guess == target, mask=rows < R)


@triton.jit
def p_kl_project_kernel(
    transposed_ptr, lse_ptr, columns_ptr, offsets_ptr, sources_ptr, weights_ptr, projected_ptr, sums_ptr,
    K, padded, scale, PER: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """`softmax W[:, K]` of PER compared columns for ROWS positions, and its sum over them."""
    part = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lse = tl.load(lse_ptr + rows)
    sums = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, PER, COLUMNS):
        k = part * PER + start + tl.arange(0, COLUMNS)
        column = tl.load(columns_ptr + k, mask=k < K, other=0)
        first = tl.load(offsets_ptr + column, mask=k < K, other=0)
        count = tl.load(offsets_ptr + column + 1, mask=k < K, other=0) - first
        total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
        for done in range(0, tl.max(count, axis=0), AHEAD):
            for ahead in tl.static_range(AHEAD):
                entry = done + ahead
                there = entry < count
                source = tl.load(sources_ptr + first + entry, mask=there, other=0).to(tl.int64)
                weight = tl.load(weights_ptr + first + entry, mask=there, other=0.0)
                places = source[:, None] * padded + rows[None, :]
                x = tl.load(transposed_ptr + places, mask=there[:, None], other=float("-inf")).to(tl.float32)
                total += weight[:, None] * tl.exp(x * scale - lse[None, :])
        tl.store(projected_ptr + k[:, None] * padded + rows[None, :], total, mask=(k < K)[:, None])
        sums += tl.sum(total, axis=0)
    tl.store(sums_ptr + part * padded + rows, sums)


@triton.jit(do_not_specialize=["R", "T"])
def p_kl_teacher_kernel(
    logits_ptr, columns_ptr, gathered_ptr, top_ptr, total_ptr, R, T, K, stride_b, stride_t, padded, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """A tile of teacher logits at compared columns: its sums, and a copy with the positions side by side."""
    part = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = part * COLUMNS + tl.arange(0, COLUMNS)
    column = tl.load(columns_ptr + k, mask=k < K, other=0)
    base = row_bases(logits_ptr, rows, T, stride_b, stride_t)
    inside = (rows < R)[:, None] & (k < K)[None, :]
    start = tl.min(column, axis=0)
    if (tl.max(tl.abs(column - start - tl.arange(0, COLUMNS)), axis=0) == 0) & (start % 16 == 0):
        start = tl.multiple_of(start, 16)
        x = tl.load(base[:, None] + (start + tl.arange(0, COLUMNS))[None, :], mask=(rows < R)[:, None], other=0.0)
    else:
        x = tl.load(base[:, None] + column[None, :], mask=inside, other=float("-inf"))
    tl.store(gathered_ptr + k[None, :] * padded + rows[:, None], x, mask=inside)
    store_tile_sums(x.to(tl.float32) * scale, top_ptr, total_ptr, part * padded + rows)


@triton.jit
def position(order_ptr, first, count, i):
    """The chunks' positions number `i`, int32; some position of the buffer where there is none."""
    return tl.load(order_ptr + tl.maximum(first + tl.minimum(i, count - 1), 0)).to(tl.int32)


@triton.jit
def chunk_of_students(block_ptr, order_ptr, first, count, row, left, padded, COLUMNS: tl.constexpr):
    """The chunks' mean projected probabilities, `[chunks, COLUMNS]`; `row` is each chunk's first position.

    `block_ptr` is the first column's row of the buffer, `left` the number of columns from there.
    """
    k = tl.arange(0, COLUMNS)
    there = (k < left)[None, :] & (count > 0)[:, None]
    total = tl.load(block_ptr + (k[None, :] * padded + row[:, None]), mask=there, other=0.0)
    for i in range(1, tl.max(count, axis=0)):
        row = position(order_ptr, first, count, i)
        there = (k < left)[None, :] & (i < count)[:, None]
        total += tl.load(block_ptr + (k[None, :] * padded + row[:, None]), mask=there, other=0.0)
    return total / (count.to(tl.float32) + EPS)[:, None]


@triton.jit
def teacher_term(block_ptr, lse, there, offsets, scale, PROB: tl.constexpr):
    """Log-probabilities (probabilities) of one position per chunk; 0 where there is none."""
    x = tl.load(block_ptr + offsets, mask=there, other=0.0).to(tl.float32)
    log_p = x * scale - lse[:, None]
    return tl.where(there, tl.exp(log_p) if PROB else log_p, 0.0)


@triton.jit
def chunk_of_teachers(
    block_ptr, order_ptr, lse_ptr, first, count, row, lse, left, Q, padded, scale,
    PROB: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The chunks' averaged log-probabilities, `[chunks, COLUMNS]`; -inf beyond the columns."""
    k = tl.arange(0, COLUMNS)
    there = (k < left)[None, :] & (count > 0)[:, None]
    total = teacher_term(block_ptr, lse, there, k[None, :] * padded + row[:, None], scale, PROB)
    for i in range(1, tl.max(count, axis=0)):
        row = position(order_ptr, first, count, i)
        there = (k < left)[None, :] & (i < count)[:, None]
        offsets = k[None, :] * padded + row[:, None]
        total += teacher_term(block_ptr, tl.load(lse_ptr + row), there, offsets, scale, PROB)
    mean = total / (count.to(tl.float32) + EPS)[:, None]
    log_p = tl.log(mean + EPS) if PROB else mean
    log_p = tl.where((Q == 0.0) & (log_p == float("-inf")), LOG_EPS, log_p)
    return tl.where((k < left)[None, :], log_p, float("-inf"))


@triton.jit
def mean_of_rows(values_ptr, order_ptr, first, count, CHUNKS: tl.constexpr):
    """The mean of one value per position over each chunk."""
    total = tl.zeros((CHUNKS,), dtype=tl.float32)
    for i in range(tl.max(count, axis=0)):
        row = position(order_ptr, first, count, i)
        total += tl.where(i < count, tl.load(values_ptr + row), 0.0)
    return total / (count.to(tl.float32) + EPS)


@triton.jit
def slope(r, log_p, REVERSE: tl.constexpr):
    """The derivative of a chunk's divergence by `r`, its normalised projected probabilities plus eps."""
    return tl.log(r) - log_p + 1.0 if REVERSE else -tl.exp(log_p) / r


@triton.jit(do_not_specialize=["C"])
def p_kl_chunk_kernel(
    projected_ptr, sums_ptr, student_order_ptr, student_first_ptr,
    gathered_ptr, teacher_order_ptr, teacher_first_ptr, teacher_lse_ptr,
    norm_ptr, kl_ptr, mass_ptr, inner_ptr, best_q_ptr, at_q_ptr, best_l_ptr, at_l_ptr,
    C, K, student_padded, teacher_padded, chunks_padded, scale,
    REVERSE: tl.constexpr, PROB: tl.constexpr, PER: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """PER compared columns of CHUNKS chunks: their part of the divergence, and of what its gradient needs."""
    part = tl.program_id(0).to(tl.int64)
    chunks = tl.program_id(1).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    first_s = tl.load(student_first_ptr + chunks, mask=chunks < C, other=0)
    count_s = tl.load(student_first_ptr + chunks + 1, mask=chunks < C, other=0) - first_s
    first_t = tl.load(teacher_first_ptr + chunks, mask=chunks < C, other=0)
    count_t = tl.load(teacher_first_ptr + chunks + 1, mask=chunks < C, other=0) - first_t
    norm = mean_of_rows(sums_ptr, student_order_ptr, first_s, count_s, CHUNKS) + EPS
    row_s = position(student_order_ptr, first_s, count_s, 0)
    row_t = position(teacher_order_ptr, first_t, count_t, 0)
    lse_t = tl.load(teacher_lse_ptr + row_t)
    kl = tl.zeros((CHUNKS, COLUMNS), dtype=tl.float32)
    mass = tl.zeros((CHUNKS, COLUMNS), dtype=tl.float32)
    inner = tl.zeros((CHUNKS, COLUMNS), dtype=tl.float32)
    best_q = tl.full((CHUNKS, COLUMNS), -1.0, dtype=tl.float32)
    best_l = tl.full((CHUNKS, COLUMNS), float("-inf"), dtype=tl.float32)
    at_q = tl.zeros((CHUNKS, COLUMNS), dtype=tl.int32)
    at_l = tl.zeros((CHUNKS, COLUMNS), dtype=tl.int32)
    for start in range(0, PER, COLUMNS):
        from_k = part * PER + start
        k = from_k + tl.arange(0, COLUMNS)
        inside = (k < K)[None, :]
        Q = chunk_of_students(
            projected_ptr + from_k * student_padded, student_order_ptr, first_s, count_s, row_s, K - from_k,
            student_padded, COLUMNS
        )  # fmt: skip
        log_p = chunk_of_teachers(
            gathered_ptr + from_k * teacher_padded, teacher_order_ptr, teacher_lse_ptr, first_t, count_t, row_t,
            lse_t, K - from_k, Q, teacher_padded, scale, PROB, COLUMNS
        )  # fmt: skip
        r = Q / norm[:, None] + EPS
        p = tl.where(inside, tl.exp(log_p), 0.0)
        safe = tl.where(log_p == float("-inf"), 0.0, log_p)
        term = r * (tl.log(r) - log_p) if REVERSE else tl.where(p > 0.0, p * (safe - tl.log(r)), 0.0)
        kl += tl.where(inside, term, 0.0)
        mass += p
        inner += tl.where(inside, slope(r, log_p, REVERSE) * (Q / norm[:, None]), 0.0)
        raw = tl.where(inside, Q, -1.0)
        here = k[None, :].to(tl.int32)
        at_q = tl.where(raw > best_q, here, at_q)
        best_q = tl.maximum(best_q, raw)
        at_l = tl.where((log_p > best_l) | (start == 0), here, at_l)
        best_l = tl.maximum(best_l, log_p)
    places = part * chunks_padded + chunks
    top_q, top_l = tl.max(best_q, axis=1), tl.max(best_l, axis=1)
    tl.store(norm_ptr + chunks, norm)
    tl.store(kl_ptr + places, tl.sum(kl, axis=1))
    tl.store(mass_ptr + places, tl.sum(mass, axis=1))
    tl.store(inner_ptr + places, tl.sum(inner, axis=1))
    tl.store(best_q_ptr + places, top_q)
    tl.store(at_q_ptr + places, tl.min(tl.where(best_q == top_q[:, None], at_q, 2147483647), axis=1))
    tl.store(best_l_ptr + places, top_l)
    tl.store(at_l_ptr + places, tl.min(tl.where(best_l == top_l[:, None], at_l, 2147483647), axis=1))


@triton.jit(do_not_specialize=["C"])
def p_kl_chunk_rows_kernel(
    kl_ptr, mass_ptr, inner_ptr, best_q_ptr, at_q_ptr, best_l_ptr, at_l_ptr,
    kl_out_ptr, mass_out_ptr, inner_out_ptr, agrees_ptr, C, parts, padded, PARTS: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """CHUNKS chunks from their parts."""
    chunks = tl.program_id(0).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    mask = chunks < C
    tl.store(kl_out_ptr + chunks, combined_sum(kl_ptr, chunks, parts, padded, PARTS, CHUNKS), mask=mask)
    tl.store(mass_out_ptr + chunks, combined_sum(mass_ptr, chunks, parts, padded, PARTS, CHUNKS), mask=mask)
    tl.store(inner_out_ptr + chunks, combined_sum(inner_ptr, chunks, parts, padded, PARTS, CHUNKS), mask=mask)
    of_q = combined_place_of_maximum(best_q_ptr, at_q_ptr, chunks, parts, padded, PARTS, CHUNKS)
    of_l = combined_place_of_maximum(best_l_ptr, at_l_ptr, chunks, parts, padded, PARTS, CHUNKS)
    tl.store(agrees_ptr + chunks, of_q == of_l, mask=mask)


@triton.jit(do_not_specialize=["C"])
def p_kl_chunk_bwd_kernel(
    projected_ptr, student_order_ptr, student_first_ptr,
    gathered_ptr, teacher_order_ptr, teacher_first_ptr, teacher_lse_ptr,
    norm_ptr, inner_ptr, upstream_ptr, gradient_ptr, dots_ptr, C, K, student_padded, teacher_padded, scale,
    REVERSE: tl.constexpr, PROB: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """The gradient by the projected entries of every position of CHUNKS chunks, and its product with them."""
    part = tl.program_id(0).to(tl.int64)
    chunks = tl.program_id(1).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    upstream = tl.load(upstream_ptr + chunks, mask=chunks < C, other=0.0)
    used = (chunks < C) & (upstream != 0.0)
    first_s = tl.load(student_first_ptr + chunks, mask=used, other=0)
    count_s = tl.load(student_first_ptr + chunks + 1, mask=used, other=0) - first_s
    first_t = tl.load(teacher_first_ptr + chunks, mask=used, other=0)
    count_t = tl.load(teacher_first_ptr + chunks + 1, mask=used, other=0) - first_t
    norm = tl.load(norm_ptr + chunks, mask=used, other=1.0)
    inner = tl.load(inner_ptr + chunks, mask=used, other=0.0)
    row_s = position(student_order_ptr, first_s, count_s, 0)
    row_t = position(teacher_order_ptr, first_t, count_t, 0)
    from_k = part * COLUMNS
    block_ptr = projected_ptr + from_k * student_padded
    Q = chunk_of_students(block_ptr, student_order_ptr, first_s, count_s, row_s, K - from_k, student_padded, COLUMNS)
    log_p = chunk_of_teachers(
        gathered_ptr + from_k * teacher_padded, teacher_order_ptr, teacher_lse_ptr, first_t, count_t, row_t,
        tl.load(teacher_lse_ptr + row_t), K - from_k, Q, teacher_padded, scale, PROB, COLUMNS
    )  # fmt: skip
    factor = upstream / norm / (count_s.to(tl.float32) + EPS)
    by_entry = factor[:, None] * (slope(Q / norm[:, None] + EPS, log_p, REVERSE) - inner[:, None])
    k = tl.arange(0, COLUMNS)
    for i in range(tl.max(count_s, axis=0)):
        row = position(student_order_ptr, first_s, count_s, i)
        there = (k < K - from_k)[None, :] & (i < count_s)[:, None]
        offsets = k[None, :] * student_padded + row[:, None]
        q = tl.load(block_ptr + offsets, mask=there, other=0.0)
        tl.store(gradient_ptr + from_k * student_padded + offsets, by_entry, mask=there)
        dot = tl.sum(tl.where(there, q * by_entry, 0.0), axis=1)
        tl.store(dots_ptr + part * student_padded + row, dot, mask=i < count_s)


@triton.jit
def pull_of_slot(places_ptr, weights_ptr, gradient_ptr, slot, v, rows, V, padded):
    """What one entry of each token's projection row adds to the gradient by its probability, `[tokens, positions]`."""
    place = tl.load(places_ptr + slot * V + v, mask=v < V, other=-1).to(tl.int64)
    weight = tl.load(weights_ptr + slot * V + v, mask=place >= 0, other=0.0)
    places = place[:, None] * padded + rows[None, :]
    return weight[:, None] * tl.load(gradient_ptr + places, mask=(place >= 0)[:, None], other=0.0)


@triton.jit(do_not_specialize=["R", "T"])
def p_kl_student_bwd_kernel(
    logits_ptr, chunk_ptr, upstream_ptr, lse_ptr, dots_ptr, gradient_ptr, places_ptr, weights_ptr, counts_ptr,
    targets_ptr, head_lse_ptr, loss_upstream_ptr, out_ptr, R, T, V, V_head, stride_b, stride_t, padded, scale,
    TARGETS: tl.constexpr, HEAD: tl.constexpr, EAGER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """A tile of the student's gradient: back through projection and softmax, plus the cross-entropy's, written once."""
    v = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (v < V_head)[:, None] & (rows < R)[None, :]
    chunk = tl.load(chunk_ptr + rows, mask=rows < R, other=-1)
    used = (chunk >= 0) & (tl.load(upstream_ptr + chunk, mask=chunk >= 0, other=0.0) != 0.0)
    base = row_bases(logits_ptr, rows, T, stride_b, stride_t)
    x = tl.load(base[None, :] + v[:, None], mask=inside, other=float("-inf")).to(tl.float32)
    count = tl.load(counts_ptr + v, mask=v < V, other=0)
    pull = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    for slot in tl.static_range(EAGER):
        pull += pull_of_slot(places_ptr, weights_ptr, gradient_ptr, slot, v, rows, V, padded)
    for slot in range(EAGER, tl.max(count, axis=0)):
        pull += pull_of_slot(places_ptr, weights_ptr, gradient_ptr, slot, v, rows, V, padded)
    p = tl.exp(x * scale - tl.load(lse_ptr + rows)[None, :])
    gradient = p * (pull - tl.load(dots_ptr + rows)[None, :]) * scale
    gradient = tl.where(used[None, :] & (v < V)[:, None], gradient, 0.0)
    if TARGETS:
        loss_upstream = tl.load(loss_upstream_ptr + rows, mask=rows < R, other=0.0)
        target = tl.load(targets_ptr + rows, mask=rows < R, other=-1)
        whole = tl.exp(x - tl.load(head_lse_ptr + rows)[None, :]) if HEAD else p
        own = (whole - (v[:, None] == target[None, :]).to(tl.float32)) * loss_upstream[None, :]
        gradient += tl.where((loss_upstream != 0.0)[None, :], own, 0.0)
    out = out_ptr + rows[None, :] * V_head + v[:, None]
    tl.store(out, gradient.to(out_ptr.dtype.element_ty), mask=inside)
