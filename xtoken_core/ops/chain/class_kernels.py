"""The Triton kernel of classes that are not plain: their sums on both sides, and their terms of the KL at a start."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.chain.start_kernels import TINY, exp, floored_log, row_of, xlogx


@triton.jit
def next_members(bits, token_ptr, at, there):
    """Return some members' tokens, and which of them are live."""
    word = tl.load(bits + (at >> 5), mask=there, other=0)
    return tl.load(token_ptr + at, mask=there, other=0), ((word >> (at & 31)) & 1) != 0


@triton.jit
def probability(base, x, live, scale, lse, CACHE: tl.constexpr):
    """Return the probability of live tokens, 0 of others."""
    z = tl.load(base + x, mask=live, other=float("-inf"), cache_modifier=CACHE).to(tl.float32) * scale
    return exp(z - lse)


@triton.jit
def terms_of(q, alive, p, m, there, ratios_ptr):
    """Return the terms of a block of classes, added up, and store the ratio of each for the gradient."""
    p = tl.where(there & (alive > 0), p, 0.0)
    kl, mass = tl.sum(xlogx(p) - p * floored_log(q), axis=0), tl.sum(p, axis=0)
    p = tl.where(q >= TINY, p, 0.0)
    ratio = p / tl.maximum(q, TINY)
    tl.store(ratios_ptr + m, ratio.to(ratios_ptr.dtype.element_ty), mask=there)
    return kl, mass, tl.sum(p, axis=0)


@triton.jit
def compare_narrow(
    s_base, t_base, s_lse, t_lse, s_bits, t_bits, s_token_ptr, t_token_ptr, block_ptr, scale, ratios_ptr,
    CLASSES: tl.constexpr, CACHE: tl.constexpr
):  # fmt: skip
    """Compare a block of narrow classes: a lane has the sums of a class on both sides."""
    lane = tl.arange(0, CLASSES)
    m = tl.load(block_ptr + 1) + lane
    s_height, t_height = tl.load(block_ptr + 3), tl.load(block_ptr + 4)
    s_at, t_at = tl.load(block_ptr + 5) + lane, tl.load(block_ptr + 6) + lane
    p, q = tl.zeros((CLASSES,), dtype=tl.float32), tl.zeros((CLASSES,), dtype=tl.float32)
    reached = tl.zeros((CLASSES,), dtype=tl.int32)
    x, s_live = next_members(s_bits, s_token_ptr, s_at, lane < s_height * CLASSES)
    y, t_live = next_members(t_bits, t_token_ptr, t_at, lane < t_height * CLASSES)
    for j in range(tl.maximum(s_height, t_height)):  # the next tokens are read while the logits of these are
        next_x, s_next = next_members(
            s_bits, s_token_ptr, s_at + (j + 1) * CLASSES, lane < (s_height - j - 1) * CLASSES
        )
        next_y, t_next = next_members(
            t_bits, t_token_ptr, t_at + (j + 1) * CLASSES, lane < (t_height - j - 1) * CLASSES
        )
        q += probability(s_base, x, s_live, scale, s_lse, "")
        p += probability(t_base, y, t_live, scale, t_lse, CACHE)
        reached = reached | s_live.to(tl.int32)
        x, s_live, y, t_live = next_x, s_next, next_y, t_next
    return terms_of(q, reached, p, m, m < tl.load(block_ptr + 2), ratios_ptr)


@triton.jit
def compare_wide(
    s_base, t_base, s_lse, t_lse, s_bits, t_bits, s_start_ptr, s_token_ptr, t_start_ptr, t_token_ptr, block_ptr, scale,
    ratios_ptr, CLASSES: tl.constexpr, LANES: tl.constexpr, CACHE: tl.constexpr
):  # fmt: skip
    """Compare a block of classes that have `LANES` lanes each."""
    m = tl.load(block_ptr + 1) + tl.arange(0, CLASSES)
    there = m < tl.load(block_ptr + 2)
    lane = tl.arange(0, LANES)[None, :]
    s_first = tl.load(s_start_ptr + m, mask=there, other=0)
    t_first = tl.load(t_start_ptr + m, mask=there, other=0)
    s_count = (tl.load(s_start_ptr + m + 1, mask=there, other=0) - s_first)[:, None]
    t_count = (tl.load(t_start_ptr + m + 1, mask=there, other=0) - t_first)[:, None]
    p, q = tl.zeros((CLASSES, LANES), dtype=tl.float32), tl.zeros((CLASSES, LANES), dtype=tl.float32)
    reached = tl.zeros((CLASSES, LANES), dtype=tl.int32)
    x, s_live = next_members(s_bits, s_token_ptr, s_first[:, None] + lane, lane < s_count)
    y, t_live = next_members(t_bits, t_token_ptr, t_first[:, None] + lane, lane < t_count)
    for begin in range(0, tl.maximum(tl.load(block_ptr + 3), tl.load(block_ptr + 4)), LANES):
        j = begin + LANES + lane
        next_x, s_next = next_members(s_bits, s_token_ptr, s_first[:, None] + j, j < s_count)
        next_y, t_next = next_members(t_bits, t_token_ptr, t_first[:, None] + j, j < t_count)
        q += probability(s_base, x, s_live, scale, s_lse, "")
        p += probability(t_base, y, t_live, scale, t_lse, CACHE)
        reached = reached | s_live.to(tl.int32)
        x, s_live, y, t_live = next_x, s_next, next_y, t_next
    return terms_of(tl.sum(q, axis=1), tl.max(reached, axis=1), tl.sum(p, axis=1), m, there, ratios_ptr)


@triton.jit
def chain_class_kernel(
    student_ptr, teacher_ptr, chunk_ptr, student_row_ptr, teacher_row_ptr, s_bits_ptr, t_bits_ptr, s_lse_ptr, t_lse_ptr,
    block_ptr, s_start_ptr, s_token_ptr, t_start_ptr, t_token_ptr, ratio_ptr, terms_ptr,
    blocks, splits, E, M, T_s, T_t, W_s, W_t, s_stride_b, s_stride_t, t_stride_b, t_stride_t, scale,
    NARROW: tl.constexpr, MEDIUM: tl.constexpr, WIDE: tl.constexpr, M_LANES: tl.constexpr, W_LANES: tl.constexpr,
    CACHE: tl.constexpr
):  # fmt: skip
    """Compute the terms of some blocks of classes at the start of one chunk."""
    event, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    if tl.load(chunk_ptr + event) >= 0:
        s_base = row_of(student_ptr, tl.load(student_row_ptr + event), T_s, s_stride_b, s_stride_t)
        t_base = row_of(teacher_ptr, tl.load(teacher_row_ptr + event), T_t, t_stride_b, t_stride_t)
        s_bits, t_bits = s_bits_ptr + event.to(tl.int64) * W_s, t_bits_ptr + event.to(tl.int64) * W_t
        s_lse, t_lse = tl.load(s_lse_ptr + event), tl.load(t_lse_ptr + event)
        ratio_ptr += event.to(tl.int64) * M
        kl, mass, kept = s_lse * 0.0, s_lse * 0.0, s_lse * 0.0
        for block in range(split, blocks, splits):
            own_ptr = block_ptr + block * 7
            kind = tl.load(own_ptr)
            if kind == 0:
                of_kl, of_mass, of_kept = compare_narrow(
                    s_base, t_base, s_lse, t_lse, s_bits, t_bits, s_token_ptr, t_token_ptr, own_ptr, scale, ratio_ptr,
                    NARROW, CACHE
                )  # fmt: skip
            elif kind == 1:
                of_kl, of_mass, of_kept = compare_wide(
                    s_base, t_base, s_lse, t_lse, s_bits, t_bits, s_start_ptr, s_token_ptr, t_start_ptr, t_token_ptr,
                    own_ptr, scale, ratio_ptr, MEDIUM, M_LANES, CACHE
                )  # fmt: skip
            else:
                of_kl, of_mass, of_kept = compare_wide(
                    s_base, t_base, s_lse, t_lse, s_bits, t_bits, s_start_ptr, s_token_ptr, t_start_ptr, t_token_ptr,
                    own_ptr, scale, ratio_ptr, WIDE, W_LANES, CACHE
                )  # fmt: skip
            kl += of_kl
            mass += of_mass
            kept += of_kept
        terms_ptr += (split + 1).to(tl.int64) * 3 * E + event  # the first three rows are those of plain classes
        tl.store(terms_ptr, kl)
        tl.store(terms_ptr + E, mass)
        tl.store(terms_ptr + 2 * E, kept)
