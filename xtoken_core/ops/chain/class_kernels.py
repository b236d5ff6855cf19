"""The Triton kernel of classes that are not plain: their sums on both sides, and their terms of the KL at a start."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.chain.start_kernels import TINY, exp, floored_log, is_live, row_of, xlogx


@triton.jit
def narrow_sums(base, scale, lse, bits, start_ptr, token_ptr, m, there, height):
    """Return the probability of classes, a lane each, and 1 where a member is live."""
    first = tl.load(start_ptr + m, mask=there, other=0)
    count = tl.load(start_ptr + m + 1, mask=there, other=0) - first
    total = tl.zeros(m.shape, dtype=tl.float32)
    reached = tl.zeros(m.shape, dtype=tl.int32)
    for j in range(height):
        live = is_live(bits, first + j, j < count)
        x = tl.load(token_ptr + first + j, mask=j < count, other=0)
        z = tl.load(base + x, mask=live, other=float("-inf")).to(tl.float32) * scale
        total += exp(z - lse)
        reached = reached | live.to(tl.int32)
    return total, reached


@triton.jit
def wide_sums(base, scale, lse, bits, start_ptr, token_ptr, m, there, height, LANES: tl.constexpr):
    """Return the probability of classes, `LANES` lanes each, and 1 where a member is live."""
    first = tl.load(start_ptr + m, mask=there, other=0)
    count = tl.load(start_ptr + m + 1, mask=there, other=0) - first
    total = tl.zeros((m.shape[0], LANES), dtype=tl.float32)
    reached = tl.zeros((m.shape[0], LANES), dtype=tl.int32)
    for begin in range(0, height, LANES):
        j = begin + tl.arange(0, LANES)[None, :]
        inside = j < count[:, None]
        live = is_live(bits, first[:, None] + j, inside)
        x = tl.load(token_ptr + first[:, None] + j, mask=inside, other=0)
        z = tl.load(base + x, mask=live, other=float("-inf")).to(tl.float32) * scale
        total += exp(z - lse)
        reached = reached | live.to(tl.int32)
    return tl.sum(total, axis=1), tl.max(reached, axis=1)


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
def compare_narrow(
    s_base, t_base, s_lse, t_lse, s_bits, t_bits, s_start_ptr, s_token_ptr, t_start_ptr, t_token_ptr, first, last,
    s_height, t_height, block, event, E, M, scale, ratio_ptr, terms_ptr, CLASSES: tl.constexpr
):  # fmt: skip
    """Compare a block of narrow classes."""
    m = first + tl.arange(0, CLASSES)
    q, alive = narrow_sums(s_base, scale, s_lse, s_bits, s_start_ptr, s_token_ptr, m, m < last, s_height)
    p, _ = narrow_sums(t_base, scale, t_lse, t_bits, t_start_ptr, t_token_ptr, m, m < last, t_height)
    store_terms(q, alive, p, m, m < last, block, event, E, M, ratio_ptr, terms_ptr)


@triton.jit
def compare_wide(
    s_base, t_base, s_lse, t_lse, s_bits, t_bits, s_start_ptr, s_token_ptr, t_start_ptr, t_token_ptr, first, last,
    s_height, t_height, block, event, E, M, scale, ratio_ptr, terms_ptr, CLASSES: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Compare a block of classes that have `LANES` lanes each."""
    m = first + tl.arange(0, CLASSES)
    q, alive = wide_sums(s_base, scale, s_lse, s_bits, s_start_ptr, s_token_ptr, m, m < last, s_height, LANES)
    p, _ = wide_sums(t_base, scale, t_lse, t_bits, t_start_ptr, t_token_ptr, m, m < last, t_height, LANES)
    store_terms(q, alive, p, m, m < last, block, event, E, M, ratio_ptr, terms_ptr)


@triton.jit
def chain_class_kernel(
    student_ptr, teacher_ptr, chunk_ptr, student_row_ptr, teacher_row_ptr, s_bits_ptr, t_bits_ptr, s_lse_ptr, t_lse_ptr,
    block_ptr, s_start_ptr, s_token_ptr, t_start_ptr, t_token_ptr, ratio_ptr, terms_ptr,
    blocks, E, M, T_s, T_t, W_s, W_t, s_stride_b, s_stride_t, t_stride_b, t_stride_t, scale,
    NARROW: tl.constexpr, MEDIUM: tl.constexpr, WIDE: tl.constexpr, M_LANES: tl.constexpr, W_LANES: tl.constexpr
):  # fmt: skip
    """Compute the terms of one block of classes at the start of one chunk."""
    event, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if tl.load(chunk_ptr + event) >= 0:
        s_base = row_of(student_ptr, tl.load(student_row_ptr + event), T_s, s_stride_b, s_stride_t)
        t_base = row_of(teacher_ptr, tl.load(teacher_row_ptr + event), T_t, t_stride_b, t_stride_t)
        s_bits, t_bits = s_bits_ptr + event.to(tl.int64) * W_s, t_bits_ptr + event.to(tl.int64) * W_t
        s_lse, t_lse = tl.load(s_lse_ptr + event), tl.load(t_lse_ptr + event)
        block_ptr += block * 5
        kind, first, last = tl.load(block_ptr), tl.load(block_ptr + 1), tl.load(block_ptr + 2)
        s_height, t_height = tl.load(block_ptr + 3), tl.load(block_ptr + 4)
        if kind == 0:
            compare_narrow(
                s_base, t_base, s_lse, t_lse, s_bits, t_bits, s_start_ptr, s_token_ptr, t_start_ptr, t_token_ptr, first,
                last, s_height, t_height, block, event, E, M, scale, ratio_ptr, terms_ptr, NARROW
            )  # fmt: skip
        elif kind == 1:
            compare_wide(
                s_base, t_base, s_lse, t_lse, s_bits, t_bits, s_start_ptr, s_token_ptr, t_start_ptr, t_token_ptr, first,
                last, s_height, t_height, block, event, E, M, scale, ratio_ptr, terms_ptr, MEDIUM, M_LANES
            )  # fmt: skip
        else:
            compare_wide(
                s_base, t_base, s_lse, t_lse, s_bits, t_bits, s_start_ptr, s_token_ptr, t_start_ptr, t_token_ptr, first,
                last, s_height, t_height, block, event, E, M, scale, ratio_ptr, terms_ptr, WIDE, W_LANES
            )  # fmt: skip
