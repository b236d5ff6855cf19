"""The Triton kernels of `p_kl` that compare chunks: both sides' buffers are `[lines, K, LINE]`, see `kernels`."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.tile_kernels import combined_argmax, combined_sum, in_lines

EPS = tl.constexpr(1e-10)
LOG_EPS = tl.constexpr(-23.025850929940457)


@triton.jit
def run_of(first_ptr, chunks, C):
    """Return the start of the chunks' positions in the order of all positions, and their number, int32."""
    first = tl.load(first_ptr + chunks, mask=chunks < C, other=0).to(tl.int32)
    return first, tl.load(first_ptr + chunks + 1, mask=chunks < C, other=0).to(tl.int32) - first


@triton.jit
def position(order_ptr, first, count, i):
    """Return the chunks' `i`-th positions, int32; some valid position where there is none."""
    # Clamped instead of masked: an address that exists, whose value the caller masks.
    return tl.load(order_ptr + tl.maximum(first + tl.minimum(i, count - 1), 0)).to(tl.int32)


@triton.jit
def chunk_of_students(
    block_ptr, order_ptr, first, count, most, line, left, K, COLUMNS: tl.constexpr, LINE: tl.constexpr
):
    """Return projected probabilities of the chunks' first positions and the chunks' means, `[chunks, COLUMNS]` each.

    `block_ptr` is the first column of the buffer and `left` the number of columns from there; `line` is where each
    chunk's first position lies, and `most` the number of positions of the longest chunk.
    """
    k = tl.arange(0, COLUMNS)
    there = (k < left)[None, :] & (count > 0)[:, None]
    q = tl.load(block_ptr + (line[:, None] + k[None, :] * LINE), mask=there, other=0.0)
    total = q
    # Most chunks have one position. Longer ones add up in the order of positions, so sums do not depend on the batch.
    for i in range(1, most):
        line = in_lines(position(order_ptr, first, count, i), K, LINE)
        there = (k < left)[None, :] & (i < count)[:, None]
        total += tl.load(block_ptr + (line[:, None] + k[None, :] * LINE), mask=there, other=0.0)
    return q, total / (count.to(tl.float32) + EPS)[:, None]


@triton.jit
def teacher_term(block_ptr, lse, there, offsets, scale, PROB: tl.constexpr):
    """Return log-probabilities (probabilities) of one position per chunk; 0 where there is none."""
    x = tl.load(block_ptr + offsets, mask=there, other=0.0).to(tl.float32)
    log_p = x * scale - lse[:, None]
    return tl.where(there, tl.exp(log_p) if PROB else log_p, 0.0)


@triton.jit
def chunk_of_teachers(
    block_ptr,
    order_ptr,
    lse_ptr,
    first,
    count,
    most,
    line,
    lse,
    left,
    Q,
    K,
    scale,
    PROB: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINE: tl.constexpr,
):
    """Return the chunks' averaged log-probabilities, `[chunks, COLUMNS]`; -inf beyond the columns."""
    k = tl.arange(0, COLUMNS)
    there = (k < left)[None, :] & (count > 0)[:, None]
    total = teacher_term(block_ptr, lse, there, line[:, None] + k[None, :] * LINE, scale, PROB)
    for i in range(1, most):
        row = position(order_ptr, first, count, i)
        there = (k < left)[None, :] & (i < count)[:, None]
        offsets = in_lines(row, K, LINE)[:, None] + k[None, :] * LINE
        total += teacher_term(block_ptr, tl.load(lse_ptr + row), there, offsets, scale, PROB)
    mean = total / (count.to(tl.float32) + EPS)[:, None]
    log_p = tl.log(mean + EPS) if PROB else mean
    # A token with probability 0 on both sides costs nothing (`reference.compared_chunks`).
    log_p = tl.where((Q == 0.0) & (log_p == float("-inf")), LOG_EPS, log_p)
    return tl.where((k < left)[None, :], log_p, float("-inf"))


@triton.jit
def mean_of_rows(values_ptr, order_ptr, first, count, most, CHUNKS: tl.constexpr):
    """Return the mean of one value per position over each chunk."""
    total = tl.zeros((CHUNKS,), dtype=tl.float32)
    for i in range(most):
        row = position(order_ptr, first, count, i)
        total += tl.where(i < count, tl.load(values_ptr + row), 0.0)
    return total / (count.to(tl.float32) + EPS)


@triton.jit
def term(r, log_p, REVERSE: tl.constexpr):
    """Compute a column's term of a chunk's divergence; `r` as for `slope`."""
    p = tl.exp(log_p)
    forward = tl.where(p > 0.0, p * (tl.where(log_p == float("-inf"), 0.0, log_p) - tl.log(r)), 0.0)
    return r * (tl.log(r) - log_p) if REVERSE else forward


@triton.jit
def slope(r, log_p, REVERSE: tl.constexpr):
    """Compute the derivative of a chunk's divergence by `r`, its normalised projected probabilities plus eps."""
    return tl.log(r) - log_p + 1.0 if REVERSE else -tl.exp(log_p) / r


@triton.jit
def further_positions(
    block_ptr,
    products_ptr,
    order_ptr,
    first,
    count,
    most,
    line,
    left,
    K,
    PER: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    LINE: tl.constexpr,
):
    """Store the results at the chunks' first positions for their other positions: PER columns from `block_ptr`."""
    # The slopes at first positions were stored by other threads. Each other position has the same slopes, but its own
    # probabilities, which are read before they are overwritten: `products` needs them.
    tl.debug_barrier()
    for i in range(1, most):
        row = position(order_ptr, first, count, i)
        other = in_lines(row, K, LINE)
        product = tl.zeros((CHUNKS,), dtype=tl.float32)
        for start in range(0, PER, COLUMNS):
            k = start + tl.arange(0, COLUMNS)
            there = (k < left)[None, :] & (i < count)[:, None]
            by_entry = tl.load(block_ptr + line[:, None] + k[None, :] * LINE, mask=there, other=0.0)
            places = other[:, None] + k[None, :] * LINE
            product += tl.sum(by_entry * tl.load(block_ptr + places, mask=there, other=0.0), axis=1)
            tl.store(block_ptr + places, by_entry, mask=there)
        tl.store(products_ptr + row, product, mask=i < count)


@triton.jit
def larger(best, at, values, k, always):
    """Return the larger of `best` and each row's maximum, with its lowest column, which is also taken if `always`."""
    top = tl.max(values, axis=1)
    here = tl.min(tl.where(values == top[:, None], k[None, :], 2147483647), axis=1)
    taken = (top > best) | always
    return tl.where(taken, top, best), tl.where(taken, here, at)


@triton.jit(do_not_specialize=["C"])
def p_kl_chunk_kernel(
    projected_ptr,
    sums_ptr,
    student_order_ptr,
    student_first_ptr,
    gathered_ptr,
    teacher_order_ptr,
    teacher_first_ptr,
    teacher_lse_ptr,
    products_ptr,
    norm_ptr,
    kl_ptr,
    mass_ptr,
    inner_ptr,
    best_q_ptr,
    at_q_ptr,
    best_l_ptr,
    at_l_ptr,
    C,
    K,
    student_padded,
    chunks_padded,
    scale,
    REVERSE: tl.constexpr,
    PROB: tl.constexpr,
    PER: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    LINE: tl.constexpr,
):
    """Compute PER columns of CHUNKS chunks: part of the divergence; slopes replace the positions' probabilities."""
    part = tl.program_id(0).to(tl.int64)
    chunks = tl.program_id(1).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    first_s, count_s = run_of(student_first_ptr, chunks, C)
    first_t, count_t = run_of(teacher_first_ptr, chunks, C)
    most_s, most_t = tl.max(count_s, axis=0), tl.max(count_t, axis=0)
    # The sum over K of a mean is the mean of the positions' sums: the norm is known before the columns.
    norm = mean_of_rows(sums_ptr, student_order_ptr, first_s, count_s, most_s, CHUNKS) + EPS
    share = 1.0 / norm
    row_s, row_t = position(student_order_ptr, first_s, count_s, 0), position(teacher_order_ptr, first_t, count_t, 0)
    line_s, line_t = in_lines(row_s, K, LINE), in_lines(row_t, K, LINE)
    lse_t = tl.load(teacher_lse_ptr + row_t)
    # A thread has all columns of its chunks, so that a sum over them stays in it, and one number is kept of each.
    nothing = tl.zeros((CHUNKS,), dtype=tl.float32)
    kl, mass, inner, product, best_q, best_l = nothing, nothing, nothing, nothing, nothing, nothing
    at_q, at_l = nothing.to(tl.int32), nothing.to(tl.int32)
    for start in range(0, PER, COLUMNS):
        from_k = part * PER + start
        k = from_k + tl.arange(0, COLUMNS)
        inside = (k < K)[None, :]
        block_ptr = projected_ptr + from_k * LINE
        q, Q = chunk_of_students(
            block_ptr, student_order_ptr, first_s, count_s, most_s, line_s, K - from_k, K, COLUMNS, LINE
        )
        log_p = chunk_of_teachers(
            gathered_ptr + from_k * LINE,
            teacher_order_ptr,
            teacher_lse_ptr,
            first_t,
            count_t,
            most_t,
            line_t,
            lse_t,
            K - from_k,
            Q,
            K,
            scale,
            PROB,
            COLUMNS,
            LINE,
        )
        Qn = Q * share[:, None]
        # With r = Q / (sum Q + eps) + eps the chunk's value is a sum of `term`, its derivative by r `slope`. Through
        # the norm every Q_k gets (slope_k - inner) / norm, inner = sum slope_k Q_k / norm; `kernels` has the rest.
        kl += tl.sum(tl.where(inside, term(Qn + EPS, log_p, REVERSE), 0.0), axis=1)
        mass += tl.sum(tl.where(inside, tl.exp(log_p), 0.0), axis=1)
        by_entry = slope(Qn + EPS, log_p, REVERSE)
        inner += tl.sum(tl.where(inside, by_entry * Qn, 0.0), axis=1)
        product += tl.sum(tl.where(inside, by_entry * q, 0.0), axis=1)
        places = line_s[:, None] + tl.arange(0, COLUMNS)[None, :] * LINE
        # The buffer of probabilities becomes that of slopes: q is not needed any more.
        tl.store(block_ptr + places, by_entry, mask=inside & (count_s > 0)[:, None])
        best_q, at_q = larger(best_q, at_q, tl.where(inside, Q, -1.0), k.to(tl.int32), start == 0)
        best_l, at_l = larger(best_l, at_l, log_p, k.to(tl.int32), start == 0)
    tl.store(products_ptr + part * student_padded + row_s, product, mask=count_s > 0)
    further_positions(
        projected_ptr + part * PER * LINE,
        products_ptr + part * student_padded,
        student_order_ptr,
        first_s,
        count_s,
        most_s,
        line_s,
        K - part * PER,
        K,
        PER,
        COLUMNS,
        CHUNKS,
        LINE,
    )
    tl.store(norm_ptr + chunks, norm)
    places = part * chunks_padded + chunks
    tl.store(kl_ptr + places, kl)
    tl.store(mass_ptr + places, mass)
    tl.store(inner_ptr + places, inner)
    tl.store(best_q_ptr + places, best_q)
    tl.store(at_q_ptr + places, at_q)
    tl.store(best_l_ptr + places, best_l)
    tl.store(at_l_ptr + places, at_l)


@triton.jit(do_not_specialize=["C"])
def p_kl_chunk_rows_kernel(
    kl_ptr,
    mass_ptr,
    inner_ptr,
    best_q_ptr,
    at_q_ptr,
    best_l_ptr,
    at_l_ptr,
    kl_out_ptr,
    mass_out_ptr,
    inner_out_ptr,
    agrees_ptr,
    C,
    parts,
    padded,
    PARTS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Reduce CHUNKS chunks from their parts."""
    chunks = tl.program_id(0).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    mask = chunks < C
    tl.store(kl_out_ptr + chunks, combined_sum(kl_ptr, chunks, parts, padded, PARTS, CHUNKS), mask=mask)
    tl.store(mass_out_ptr + chunks, combined_sum(mass_ptr, chunks, parts, padded, PARTS, CHUNKS), mask=mask)
    tl.store(inner_out_ptr + chunks, combined_sum(inner_ptr, chunks, parts, padded, PARTS, CHUNKS), mask=mask)
    of_q = combined_argmax(best_q_ptr, at_q_ptr, chunks, parts, padded, PARTS, CHUNKS)
    of_l = combined_argmax(best_l_ptr, at_l_ptr, chunks, parts, padded, PARTS, CHUNKS)
    tl.store(agrees_ptr + chunks, of_q == of_l, mask=mask)
