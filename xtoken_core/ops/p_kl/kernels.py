"""The Triton kernels of `p_kl`. Logits are read in tiles where they are; everything else lies token by token.

A buffer that is `K` or `V_s` high is `[lines, height, LINE]`: LINE neighbouring positions side by side per column or
token id, so that a projection entry moves a whole line and a tile of positions lies in one piece.
"""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.tile_kernels import (
    LOG2_E,
    combined_log_sum_exp,
    exp_above,
    row_bases,
    store_tile_sums,
    tile_of_lines,
)

EPS = tl.constexpr(1e-10)


@triton.jit
def p_kl_slots_kernel(
    slot_targets_ptr, slot_weights_ptr, place_ptr, places_ptr, weights_ptr, counts_ptr, V, SLOTS, BLOCK: tl.constexpr
):
    """Move each student token's entries whose teacher token is compared to the front, and count them."""
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.zeros((BLOCK,), dtype=tl.int32)
    for slot in range(SLOTS):
        target = tl.load(slot_targets_ptr + slot * V + v, mask=v < V, other=-1)
        # -1 where the teacher's token is not compared: the entry is dropped and later ones move up.
        place = tl.load(place_ptr + target, mask=target >= 0, other=-1)
        weight = tl.load(slot_weights_ptr + slot * V + v, mask=place >= 0, other=0.0)
        tl.store(places_ptr + kept * V + v, place, mask=place >= 0)
        tl.store(weights_ptr + kept * V + v, weight, mask=place >= 0)
        kept += (place >= 0).to(tl.int32)
    for slot in range(SLOTS):
        empty = (v < V) & (slot >= kept)
        tl.store(places_ptr + slot * V + v, tl.full((BLOCK,), -1, dtype=tl.int32), mask=empty)
        tl.store(weights_ptr + slot * V + v, tl.zeros((BLOCK,), dtype=tl.float32), mask=empty)
    tl.store(counts_ptr + v, kept, mask=v < V)


@triton.jit(do_not_specialize=["R", "T", "from_row"])
def p_kl_student_kernel(
    logits_ptr,
    counts_ptr,
    transposed_ptr,
    top_ptr,
    total_ptr,
    head_top_ptr,
    head_total_ptr,
    R,
    T,
    from_row,
    V,
    V_head,
    stride_b,
    stride_t,
    width,
    scale,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINE: tl.constexpr,
):
    """Reduce a tile of student logits to its sums; copy the ids that project into K, positions contiguous."""
    part = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1).to(tl.int64)
    local = tile * ROWS + tl.arange(0, ROWS)
    rows = from_row + local
    v = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    base = row_bases(logits_ptr, rows, T, stride_b, stride_t)
    inside = (rows < R)[:, None] & (v < V_head)[None, :]
    raw = tl.load(base[:, None] + v[None, :], mask=inside, other=float("-inf"))  # [ROWS, COLUMNS]
    needed = tl.load(counts_ptr + v, mask=v < V, other=0) > 0
    # Only ids that project into K are read again, from this copy.
    if tl.max(needed.to(tl.int32), axis=0) > 0:
        places = tl.arange(0, ROWS)[:, None] + v[None, :] * LINE
        tl.store(transposed_ptr + tile_of_lines(tile, V, ROWS, LINE) + places, raw, mask=needed[None, :])
    x = raw.to(tl.float32)
    if HEAD:
        store_tile_sums(x, 1.0, head_top_ptr, head_total_ptr, part * width + local)
        # The vocabulary is cut from the head behind the load: a tile can hold both.
        x = tl.where((v < V)[None, :], x, float("-inf"))
    store_tile_sums(x, scale, top_ptr, total_ptr, part * width + local)


@triton.jit(do_not_specialize=["R", "T", "from_row"])
def p_kl_student_rows_kernel(
    logits_ptr,
    targets_ptr,
    top_ptr,
    total_ptr,
    head_top_ptr,
    head_total_ptr,
    lse_ptr,
    head_lse_ptr,
    losses_ptr,
    hits_ptr,
    R,
    T,
    from_row,
    V_head,
    parts,
    stride_b,
    stride_t,
    width,
    TARGETS: tl.constexpr,
    HEAD: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute each student position's log-sum-exp; with targets the whole head's cross-entropy and first guess.

    Without HEAD the head's sums are those of the first log-sum-exp.
    """
    local = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows = from_row + local
    top, lse = combined_log_sum_exp(top_ptr, total_ptr, local, parts, width, PARTS, ROWS)
    tl.store(lse_ptr + rows, lse)
    if TARGETS:
        head_lse = lse
        if HEAD:
            top, head_lse = combined_log_sum_exp(head_top_ptr, head_total_ptr, local, parts, width, PARTS, ROWS)
        # The first tile whose maximum is the row's holds the lowest id of it; that tile alone is read again.
        lanes = tl.arange(0, PARTS).to(tl.int64)
        tile = tl.full((PARTS, ROWS), 2147483647, dtype=tl.int64)
        for start in range(0, parts, PARTS):
            n = start + lanes
            places = n[:, None] * width + local[None, :]
            value = tl.load(head_top_ptr + places, mask=(n < parts)[:, None], other=float("nan"))
            tile = tl.minimum(tile, tl.where(value == top[None, :], n[:, None], 2147483647))
        base = row_bases(logits_ptr, rows, T, stride_b, stride_t)
        v = tl.min(tile, axis=0)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]  # [ROWS, COLUMNS]
        inside = (rows < R)[:, None] & (v < V_head)
        x = tl.load(base[:, None] + v, mask=inside, other=float("nan")).to(tl.float32)
        guess = tl.min(tl.where(x == top[:, None], v, 9223372036854775807), axis=1)
        target = tl.load(targets_ptr + rows, mask=rows < R, other=0)
        own = tl.load(base + target, mask=rows < R, other=0.0).to(tl.float32)
        tl.store(head_lse_ptr + rows, head_lse)
        tl.store(losses_ptr + rows, head_lse - own, mask=rows < R)
        tl.store(hits_ptr + rows, guess == target, mask=rows < R)


@triton.jit(do_not_specialize=["from_row"])
def p_kl_project_kernel(
    transposed_ptr,
    lse_ptr,
    columns_ptr,
    offsets_ptr,
    sources_ptr,
    weights_ptr,
    projected_ptr,
    sums_ptr,
    K,
    V,
    from_row,
    width,
    scale,
    PER: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
    LINE: tl.constexpr,
):
    """Compute `softmax W[:, K]` of PER compared columns for ROWS positions, and its sum over them."""
    part = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, ROWS)
    from_ptr = transposed_ptr + tile_of_lines(tile, V, ROWS, LINE)
    to_ptr = projected_ptr + tile_of_lines(from_row // ROWS + tile, K, ROWS, LINE)
    lse = tl.load(lse_ptr + from_row + tile * ROWS + lane) * LOG2_E
    sums = tl.zeros((ROWS,), dtype=tl.float32)
    for done in range(0, PER, COLUMNS):
        k = part * PER + done + tl.arange(0, COLUMNS)
        column = tl.load(columns_ptr + k, mask=k < K, other=0)
        first = tl.load(offsets_ptr + column, mask=k < K, other=0)
        count = tl.load(offsets_ptr + column + 1, mask=k < K, other=0) - first
        # [COLUMNS, ROWS], positions contiguous: an entry of the projection moves a line of ROWS positions.
        total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
        for entries in range(0, tl.max(count, axis=0), AHEAD):
            # Unrolled, so that the loads of several entries are on their way at once.
            for ahead in tl.static_range(AHEAD):
                entry = entries + ahead
                there = entry < count
                source = tl.load(sources_ptr + first + entry, mask=there, other=0)
                weight = tl.load(weights_ptr + first + entry, mask=there, other=0.0)
                x = tl.load(
                    from_ptr + (source[:, None] * LINE + lane[None, :]), mask=there[:, None], other=float("-inf")
                ).to(tl.float32)
                total += weight[:, None] * tl.exp2(x * (scale * LOG2_E) - lse[None, :])
        tl.store(to_ptr + (k[:, None] * LINE + lane[None, :]), total, mask=(k < K)[:, None])
        sums += tl.sum(total, axis=0)
    tl.store(sums_ptr + part * width + tile * ROWS + lane, sums)


@triton.jit(do_not_specialize=["R", "T"])
def p_kl_teacher_kernel(
    logits_ptr,
    columns_ptr,
    token_ptr,
    offsets_ptr,
    gathered_ptr,
    top_ptr,
    total_ptr,
    unnamed_ptr,
    R,
    T,
    K,
    stride_b,
    stride_t,
    padded,
    scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINE: tl.constexpr,
):
    """Reduce a tile of teacher logits at compared columns to its sums; copy it, positions contiguous.

    One of the sums is over the tokens that no row of the projection names.
    """
    part = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column = tl.load(columns_ptr + k, mask=k < K, other=0).to(tl.int32)
    base = row_bases(logits_ptr, rows, T, stride_b, stride_t)
    inside = (rows < R)[:, None] & (k < K)[None, :]
    # Where the compared columns are adjacent (the whole vocabulary is compared) a tile is read as whole vectors.
    start = tl.min(column, axis=0)
    if (tl.max(tl.abs(column - start - tl.arange(0, COLUMNS)), axis=0) == 0) & (start % 16 == 0):
        start = start // 16 * 16  # a product: the compiler sees the alignment
        x = tl.load(base[:, None] + (start + tl.arange(0, COLUMNS))[None, :], mask=(rows < R)[:, None], other=0.0)
    else:
        x = tl.load(base[:, None] + column[None, :], mask=inside, other=float("-inf"))
    places = tl.arange(0, ROWS)[:, None] + k[None, :] * LINE
    tl.store(
        gathered_ptr + tile_of_lines(tl.program_id(1).to(tl.int64), K, ROWS, LINE) + places, x, mask=(k < K)[None, :]
    )
    token = tl.load(token_ptr + k, mask=k < K, other=0)
    entries = tl.load(offsets_ptr + token + 1, mask=k < K, other=1) - tl.load(offsets_ptr + token, mask=k < K, other=0)
    x = x.to(tl.float32)
    # As `store_tile_sums`, with a second sum of the same exponentials.
    top = tl.max(x, axis=1)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    e = exp_above(x, pivot, scale)
    tl.store(top_ptr + part * padded + rows, top * scale)
    tl.store(total_ptr + part * padded + rows, tl.sum(e, axis=1))
    tl.store(unnamed_ptr + part * padded + rows, tl.sum(tl.where((entries == 0)[None, :], e, 0.0), axis=1))


@triton.jit(do_not_specialize=["R"])
def p_kl_teacher_rows_kernel(
    top_ptr, total_ptr, unnamed_ptr, lse_ptr, mass_ptr, R, parts, padded, PARTS: tl.constexpr, ROWS: tl.constexpr
):
    """Compute ROWS teacher rows' log-sum-exps, and their mass on tokens that no row of the projection names."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    _, lse = combined_log_sum_exp(top_ptr, total_ptr, rows, parts, padded, PARTS, ROWS)
    tl.store(lse_ptr + rows, lse)
    lanes = tl.arange(0, PARTS).to(tl.int64)
    mass = tl.zeros((PARTS, ROWS), dtype=tl.float32)
    for start in range(0, parts, PARTS):
        at = (start + lanes)[:, None] * padded + rows[None, :]
        mask = (start + lanes < parts)[:, None]
        top = tl.load(top_ptr + at, mask=mask, other=float("-inf"))
        # Partial sums have the pivots of their tiles: exp(top - lse) makes them probabilities.
        mass += tl.load(unnamed_ptr + at, mask=mask, other=0.0) * tl.exp(top - lse[None, :])
    tl.store(mass_ptr + rows, tl.sum(mass, axis=0), mask=rows < R)


@triton.jit
def entry_of_slot(places_ptr, weights_ptr, slot, slots, v, V):
    """Return the places in K of a slot of the student's tokens, and its weights; -1 and 0 where it is empty."""
    there = v < tl.where(slot < slots, V, 0)
    weight = tl.load(weights_ptr + slot * V + v, mask=there, other=0.0)
    return tl.load(places_ptr + slot * V + v, mask=there, other=-1), weight


@triton.jit(do_not_specialize=["R"])
def p_kl_factors_kernel(
    chunk_ptr,
    first_ptr,
    upstream_ptr,
    norm_ptr,
    inner_ptr,
    sums_ptr,
    products_ptr,
    factor_ptr,
    of_row_ptr,
    dot_ptr,
    R,
    scale,
    ROWS: tl.constexpr,
):
    """Compute per position the factor of its gradient (0 = none), its chunk's `inner`, and slopes times `q`."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    chunk = tl.load(chunk_ptr + rows, mask=rows < R, other=-1)
    upstream = tl.load(upstream_ptr + chunk, mask=chunk >= 0, other=0.0)
    # An upstream gradient of 0 is no chunk or one that does not count: factor 0, whatever the chunk's values.
    used = upstream != 0.0
    first = tl.load(first_ptr + chunk, mask=used, other=0)
    count = tl.load(first_ptr + chunk + 1, mask=used, other=1) - first
    inner = tl.load(inner_ptr + chunk, mask=used, other=0.0)
    norm = tl.load(norm_ptr + chunk, mask=used, other=1.0)
    product, total = tl.load(products_ptr + rows, mask=used, other=0.0), tl.load(sums_ptr + rows, mask=used, other=0.0)
    tl.store(factor_ptr + rows, upstream / norm / (count.to(tl.float32) + EPS) * scale)
    tl.store(of_row_ptr + rows, inner)
    tl.store(dot_ptr + rows, product - inner * total)


@triton.jit(do_not_specialize=["R", "T"])
def p_kl_student_bwd_kernel(
    logits_ptr,
    lse_ptr,
    slopes_ptr,
    factor_ptr,
    inner_ptr,
    dot_ptr,
    places_ptr,
    weights_ptr,
    counts_ptr,
    slots,
    targets_ptr,
    head_lse_ptr,
    loss_upstream_ptr,
    out_ptr,
    R,
    T,
    V,
    V_head,
    K,
    stride_b,
    stride_t,
    scale,
    TARGETS: tl.constexpr,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINE: tl.constexpr,
):
    """Compute a tile of the student's gradient, through projection and softmax, plus the cross-entropy's."""
    # With p = softmax(z), the projection q_k = sum_v p_v W_vk, slopes g_k, and the normalisation of the chunk, which
    # subtracts `inner` from every slope: a_v = sum_k W_vk (g_k - inner), and the softmax's backward pass gives
    # p_v (a_v - sum_u p_u a_u). The last sum is sum_k q_k (g_k - inner): `dot`, stored by `p_kl_factors_kernel`.
    v = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    factor, upstream = tl.load(factor_ptr + rows), tl.zeros((ROWS,), dtype=tl.float32)
    if TARGETS:
        upstream = tl.load(loss_upstream_ptr + rows, mask=rows < R, other=0.0)
    # A position without an upstream gradient gets zeros, whatever it holds.
    used = (factor != 0.0) | (upstream != 0.0)
    inside = (rows < R)[None, :] & (v < V_head)[:, None]
    base = row_bases(logits_ptr, rows, T, stride_b, stride_t)
    x = tl.load(base[None, :] + v[:, None], mask=inside & used[None, :], other=float("-inf"))  # [COLUMNS, ROWS]
    tl.debug_barrier()  # asked for first and used last: without it the compiler would move the load to its use
    filled = tl.load(counts_ptr + v, mask=v < V, other=0)
    slopes_ptr += tile_of_lines(tl.program_id(1).to(tl.int64), K, ROWS, LINE) + tl.arange(0, ROWS)
    pull = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    weights = tl.zeros((COLUMNS,), dtype=tl.float32)
    place, weight = entry_of_slot(places_ptr, weights_ptr, 0, slots, v, V)
    for slot in range(tl.max(filled, axis=0)):
        # Lanes lie as for the logits: few tokens have an entry, and values that change lanes do so for all.
        of_place = tl.max_contiguous(slopes_ptr[None, :] + (place * LINE)[:, None], [1, 1])
        weights += weight
        pull += weight[:, None] * tl.load(of_place, mask=(place >= 0)[:, None], other=0.0)
        place, weight = entry_of_slot(places_ptr, weights_ptr, slot + 1, slots, v, V)
    x = x.to(tl.float32)
    lse = tl.where(used, tl.load(lse_ptr + rows), 0.0) * LOG2_E
    by_weight, by_row = -factor * tl.load(inner_ptr + rows), -factor * tl.load(dot_ptr + rows)
    p = tl.exp2(x * (scale * LOG2_E) - lse[None, :])
    if TARGETS and not HEAD:
        by_row += upstream  # one softmax for both
    pull = tl.where((factor != 0.0)[None, :], pull, 0.0)
    pull = pull * factor[None, :] + (weights[:, None] * by_weight[None, :] + by_row[None, :])
    gradient = p * pull
    if HEAD:
        gradient = tl.where((v < V)[:, None], gradient, 0.0)  # beyond the vocabulary p may be infinite
    if TARGETS:
        if HEAD:
            head_lse = tl.where(used, tl.load(head_lse_ptr + rows), 0.0) * LOG2_E
            gradient += tl.exp2(x * LOG2_E - head_lse[None, :]) * upstream[None, :]
        target = tl.load(targets_ptr + rows, mask=rows < R, other=-1).to(tl.int32)
        gradient -= tl.where(v[:, None] == target[None, :], upstream[None, :], 0.0)
    out = out_ptr + rows[None, :].to(tl.int64) * V_head + v[:, None]
    tl.store(out, gradient.to(out_ptr.dtype.element_ty), mask=inside)
