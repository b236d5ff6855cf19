"""The Triton kernel of classes that are not plain: their sums on both sides, and their terms of the KL at a start."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.chain.start_kernels import TINY, exp, floored_log, row_of, xlogx


@triton.jit
def event_of(event, chunk_ptr, student_row_ptr, teacher_row_ptr, s_lse_ptr, t_lse_ptr, E):
    """Return whether there is a start, its rows on both sides and the sums of their live tokens."""
    there = event < E
    at = tl.minimum(event, E - 1)
    known = there & (tl.load(chunk_ptr + at) >= 0)
    s_row, t_row = tl.load(student_row_ptr + at), tl.load(teacher_row_ptr + at)
    return known, s_row, t_row, tl.load(s_lse_ptr + at), tl.load(t_lse_ptr + at)


@triton.jit
def probabilities(base, x, bits, at, there, scale, lse, CACHE: tl.constexpr):
    """Return the probabilities of entries of a block, 0 of those that are not live, and which are."""
    live = ((tl.load(bits + (at >> 5), mask=there, other=0) >> (at & 31)) & 1) != 0
    z = tl.load(base + x, mask=live, other=float("-inf"), cache_modifier=CACHE).to(tl.float32) * scale
    return exp(z - lse), live.to(tl.int32)


@triton.jit
def store_terms(q, alive, p, m, there, block, event, E, M, ratio_ptr, terms_ptr):
    """Store the terms of a block of classes, and the ratio of each for the gradient."""
    p = tl.where(there & (alive > 0), p, 0.0)
    kl, mass = xlogx(p) - p * floored_log(q), tl.sum(p, axis=0)
    p = tl.where(q >= TINY, p, 0.0)
    ratio = p / tl.maximum(q, TINY)
    tl.store(ratio_ptr + event.to(tl.int64) * M + m, ratio.to(ratio_ptr.dtype.element_ty), mask=there)
    terms_ptr += (block + 1).to(tl.int64) * 3 * E + event  # the first three rows are those of plain classes
    tl.store(terms_ptr, tl.sum(kl, axis=0))
    tl.store(terms_ptr + E, mass)
    tl.store(terms_ptr + 2 * E, tl.sum(p, axis=0))


@triton.jit
def compare_tiles(
    student_ptr, teacher_ptr, chunk_ptr, student_row_ptr, teacher_row_ptr, s_bits_ptr, t_bits_ptr, s_lse_ptr, t_lse_ptr,
    block_ptr, s_token_ptr, t_token_ptr, ratio_ptr, terms_ptr, block, first_event, E, M, T_s, T_t, W_s, W_t,
    s_stride_b, s_stride_t, t_stride_b, t_stride_t, scale,
    HEIGHT: tl.constexpr, LENGTH: tl.constexpr, AXIS: tl.constexpr, EVENTS: tl.constexpr, CACHE: tl.constexpr
):  # fmt: skip
    """Compare a block of classes at some starts; the tokens of its entries are read once."""
    entry = tl.arange(0, HEIGHT)[:, None] * LENGTH + tl.arange(0, LENGTH)[None, :]
    m = tl.load(block_ptr + 1) + tl.arange(0, LENGTH if AXIS == 0 else HEIGHT)
    there = m < tl.load(block_ptr + 2)
    s_at, t_at = tl.load(block_ptr + 3) + entry, tl.load(block_ptr + 4) + entry
    x, y = tl.load(s_token_ptr + s_at), tl.load(t_token_ptr + t_at)
    for i in range(EVENTS):
        event = first_event + i
        known, s_row, t_row, s_lse, t_lse = event_of(
            event, chunk_ptr, student_row_ptr, teacher_row_ptr, s_lse_ptr, t_lse_ptr, E
        )  # fmt: skip
        if known:
            s_base = row_of(student_ptr, s_row, T_s, s_stride_b, s_stride_t)
            t_base = row_of(teacher_ptr, t_row, T_t, t_stride_b, t_stride_t)
            s_bits, t_bits = s_bits_ptr + event.to(tl.int64) * W_s, t_bits_ptr + event.to(tl.int64) * W_t
            q, alive = probabilities(s_base, x, s_bits, s_at, entry >= 0, scale, s_lse, "")
            p, _ = probabilities(t_base, y, t_bits, t_at, entry >= 0, scale, t_lse, CACHE)
            store_terms(
                tl.sum(q, axis=AXIS), tl.max(alive, axis=AXIS), tl.sum(p, axis=AXIS), m, there, block, event, E, M,
                ratio_ptr, terms_ptr
            )  # fmt: skip


@triton.jit
def compare_wide(
    student_ptr, teacher_ptr, chunk_ptr, student_row_ptr, teacher_row_ptr, s_bits_ptr, t_bits_ptr, s_lse_ptr, t_lse_ptr,
    block_ptr, s_token_ptr, t_token_ptr, ratio_ptr, terms_ptr, block, first_event, E, M, T_s, T_t, W_s, W_t,
    s_stride_b, s_stride_t, t_stride_b, t_stride_t, scale, TILE: tl.constexpr, EVENTS: tl.constexpr, CACHE: tl.constexpr
):  # fmt: skip
    """Compare a wide class at some starts."""
    entry = tl.arange(0, TILE)
    m = tl.load(block_ptr + 1) + tl.arange(0, 1)
    s_first, t_first = tl.load(block_ptr + 3), tl.load(block_ptr + 4)
    s_count, t_count = tl.load(block_ptr + 5), tl.load(block_ptr + 6)
    for i in range(EVENTS):
        event = first_event + i
        known, s_row, t_row, s_lse, t_lse = event_of(
            event, chunk_ptr, student_row_ptr, teacher_row_ptr, s_lse_ptr, t_lse_ptr, E
        )  # fmt: skip
        if known:
            s_base = row_of(student_ptr, s_row, T_s, s_stride_b, s_stride_t)
            t_base = row_of(teacher_ptr, t_row, T_t, t_stride_b, t_stride_t)
            s_bits, t_bits = s_bits_ptr + event.to(tl.int64) * W_s, t_bits_ptr + event.to(tl.int64) * W_t
            p, q = tl.zeros((TILE,), dtype=tl.float32), tl.zeros((TILE,), dtype=tl.float32)
            reached = tl.zeros((TILE,), dtype=tl.int32)
            for begin in range(0, tl.maximum(s_count, t_count), TILE):
                inside = begin + entry < s_count
                x = tl.load(s_token_ptr + s_first + begin + entry, mask=inside, other=0)
                more, live = probabilities(s_base, x, s_bits, s_first + begin + entry, inside, scale, s_lse, "")
                q += more
                reached = reached | live
                inside = begin + entry < t_count
                y = tl.load(t_token_ptr + t_first + begin + entry, mask=inside, other=0)
                more, _ = probabilities(t_base, y, t_bits, t_first + begin + entry, inside, scale, t_lse, CACHE)
                p += more
            none = tl.zeros((1,), dtype=tl.float32)
            store_terms(
                none + tl.sum(q, axis=0), none.to(tl.int32) + tl.max(reached, axis=0), none + tl.sum(p, axis=0), m,
                m >= 0, block, event, E, M, ratio_ptr, terms_ptr
            )  # fmt: skip


@triton.jit
def chain_class_kernel(
    student_ptr, teacher_ptr, chunk_ptr, student_row_ptr, teacher_row_ptr, s_bits_ptr, t_bits_ptr, s_lse_ptr, t_lse_ptr,
    blocks_ptr, s_token_ptr, t_token_ptr, ratio_ptr, terms_ptr, blocks, E, M, T_s, T_t, W_s, W_t,
    s_stride_b, s_stride_t, t_stride_b, t_stride_t, scale,
    H_0: tl.constexpr, H_1: tl.constexpr, H_2: tl.constexpr, L_0: tl.constexpr, L_1: tl.constexpr, TILE: tl.constexpr,
    EVENTS: tl.constexpr, CACHE: tl.constexpr
):  # fmt: skip
    """Compute the terms of one block of classes at some starts."""
    first_event, block = tl.program_id(0) // blocks * EVENTS, tl.program_id(0) % blocks
    block_ptr = blocks_ptr + block * 7
    kind = tl.load(block_ptr)
    if kind == 0:
        compare_tiles(
            student_ptr, teacher_ptr, chunk_ptr, student_row_ptr, teacher_row_ptr, s_bits_ptr, t_bits_ptr, s_lse_ptr,
            t_lse_ptr, block_ptr, s_token_ptr, t_token_ptr, ratio_ptr, terms_ptr, block, first_event, E, M, T_s, T_t,
            W_s, W_t, s_stride_b, s_stride_t, t_stride_b, t_stride_t, scale, H_0, TILE // H_0, 0, EVENTS, CACHE
        )  # fmt: skip
    elif kind == 1:
        compare_tiles(
            student_ptr, teacher_ptr, chunk_ptr, student_row_ptr, teacher_row_ptr, s_bits_ptr, t_bits_ptr, s_lse_ptr,
            t_lse_ptr, block_ptr, s_token_ptr, t_token_ptr, ratio_ptr, terms_ptr, block, first_event, E, M, T_s, T_t,
            W_s, W_t, s_stride_b, s_stride_t, t_stride_b, t_stride_t, scale, H_1, TILE // H_1, 0, EVENTS, CACHE
        )  # fmt: skip
    elif kind == 2:
        compare_tiles(
            student_ptr, teacher_ptr, chunk_ptr, student_row_ptr, teacher_row_ptr, s_bits_ptr, t_bits_ptr, s_lse_ptr,
            t_lse_ptr, block_ptr, s_token_ptr, t_token_ptr, ratio_ptr, terms_ptr, block, first_event, E, M, T_s, T_t,
            W_s, W_t, s_stride_b, s_stride_t, t_stride_b, t_stride_t, scale, H_2, TILE // H_2, 0, EVENTS, CACHE
        )  # fmt: skip
    elif kind == 3:
        compare_tiles(
            student_ptr, teacher_ptr, chunk_ptr, student_row_ptr, teacher_row_ptr, s_bits_ptr, t_bits_ptr, s_lse_ptr,
            t_lse_ptr, block_ptr, s_token_ptr, t_token_ptr, ratio_ptr, terms_ptr, block, first_event, E, M, T_s, T_t,
            W_s, W_t, s_stride_b, s_stride_t, t_stride_b, t_stride_t, scale, TILE // L_0, L_0, 1, EVENTS, CACHE
        )  # fmt: skip
    elif kind == 4:
        compare_tiles(
            student_ptr, teacher_ptr, chunk_ptr, student_row_ptr, teacher_row_ptr, s_bits_ptr, t_bits_ptr, s_lse_ptr,
            t_lse_ptr, block_ptr, s_token_ptr, t_token_ptr, ratio_ptr, terms_ptr, block, first_event, E, M, T_s, T_t,
            W_s, W_t, s_stride_b, s_stride_t, t_stride_b, t_stride_t, scale, TILE // L_1, L_1, 1, EVENTS, CACHE
        )  # fmt: skip
    else:
        compare_wide(
            student_ptr, teacher_ptr, chunk_ptr, student_row_ptr, teacher_row_ptr, s_bits_ptr, t_bits_ptr, s_lse_ptr,
            t_lse_ptr, block_ptr, s_token_ptr, t_token_ptr, ratio_ptr, terms_ptr, block, first_event, E, M, T_s, T_t,
            W_s, W_t, s_stride_b, s_stride_t, t_stride_b, t_stride_t, scale, TILE, EVENTS, CACHE
        )  # fmt: skip
