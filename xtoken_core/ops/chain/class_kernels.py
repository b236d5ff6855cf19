"""The Triton kernel of classes that are not plain: their sums on both sides, and their terms of the KL at a start."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.chain.form_kernels import SUMS, is_generated, terms_of
from xtoken_core.ops.chain.start_kernels import exp, is_live, row_of


@triton.jit
def start_of(event, chunk_ptr, student_row_ptr, teacher_row_ptr, s_lse_ptr, t_lse_ptr, E):
    """Return whether there is a start, its rows on both sides and the sums of their live tokens."""
    at = tl.minimum(event, E - 1)
    known = (event < E) & (tl.load(chunk_ptr + at) >= 0)
    s_row, t_row = tl.load(student_row_ptr + at), tl.load(teacher_row_ptr + at)
    return known, s_row, t_row, tl.load(s_lse_ptr + at), tl.load(t_lse_ptr + at)


@triton.jit
def words_of(bits_ptr, event, E, W, at):
    """Return the words with the bits of entries."""
    return tl.load(bits_ptr + tl.minimum(event, E - 1).to(tl.int64) * W + (at >> 5))


@triton.jit
def probabilities(base, x, live, scale, lse):
    """Return the probabilities of live tokens, 0 of others."""
    z = tl.load(base + x, mask=live, other=float("-inf")).to(tl.float32) * scale
    return exp(z - lse)


@triton.jit
def store_terms(q, alive, p, t_alive, m, there, block, event, E, M, results, s_row, FORM: tl.constexpr):
    """Store the terms of a block of classes, and the ratio of each for the gradient."""
    ratio_ptr, terms_ptr, generated_ptr = results
    generated = is_generated(generated_ptr, s_row, FORM)
    # Classes that no live token of the student is in are not compared (docs/losses.md, `Definition`, start).
    p = tl.where(there & (alive > 0), p, 0.0)
    if FORM != 0.0:
        both = there & (alive > 0) & (t_alive > 0)
        q = tl.where(generated & (both == 0), 0.0, q)
    kl, of_mass, ratio = terms_of(p, q, generated, (0.0, 0.0, 0.0), SUMS if FORM != 0.0 else FORM)
    if FORM != 0.0:
        ratio = tl.where(generated & (both == 0), float("-inf"), ratio)  # see `ratio_of`
    mass = tl.sum(p, axis=0)
    tl.store(ratio_ptr + event.to(tl.int64) * M + m, ratio.to(ratio_ptr.dtype.element_ty), mask=there)
    terms_ptr += (block + 1).to(tl.int64) * 3 * E + event  # the first three rows are those of plain classes
    tl.store(terms_ptr, tl.sum(kl, axis=0))
    tl.store(terms_ptr + E, mass)
    tl.store(terms_ptr + 2 * E, tl.sum(of_mass, axis=0))


@triton.jit
def compare_tiles(
    sides,
    starts,
    tokens,
    results,
    shape,
    block_ptr,
    block,
    first_event,
    scale,
    HEIGHT: tl.constexpr,
    LENGTH: tl.constexpr,
    AXIS: tl.constexpr,
    EVENTS: tl.constexpr,
    FORM: tl.constexpr,
):
    """Compare a block of classes at some starts.

    The tokens of its entries are read once, and the bits of the next start while the logits of one are.
    """
    student_ptr, teacher_ptr, s_bits_ptr, t_bits_ptr = sides
    chunk_ptr, student_row_ptr, teacher_row_ptr, s_lse_ptr, t_lse_ptr = starts
    s_token_ptr, t_token_ptr = tokens
    E, M, T_s, T_t, W_s, W_t, s_stride_b, s_stride_t, t_stride_b, t_stride_t = shape
    # [HEIGHT, LENGTH] entries. Narrow classes lie across (AXIS 0 adds up a class), medium ones along (AXIS 1).
    entry = tl.arange(0, HEIGHT)[:, None] * LENGTH + tl.arange(0, LENGTH)[None, :]
    m = tl.load(block_ptr + 1) + tl.arange(0, LENGTH if AXIS == 0 else HEIGHT)
    there = m < tl.load(block_ptr + 2)
    s_at, t_at = tl.load(block_ptr + 3) + entry, tl.load(block_ptr + 4) + entry
    known, s_row, t_row, s_lse, t_lse = start_of(
        first_event, chunk_ptr, student_row_ptr, teacher_row_ptr, s_lse_ptr, t_lse_ptr, E
    )
    s_word, t_word = words_of(s_bits_ptr, first_event, E, W_s, s_at), words_of(t_bits_ptr, first_event, E, W_t, t_at)
    x, y = tl.load(s_token_ptr + s_at), tl.load(t_token_ptr + t_at)  # the same for every start of this program
    for i in range(EVENTS):
        event = first_event + i
        # Read ahead: the bits of the next start are on their way while the logits of this one are gathered.
        next_known, next_s_row, next_t_row, next_s_lse, next_t_lse = start_of(
            event + 1, chunk_ptr, student_row_ptr, teacher_row_ptr, s_lse_ptr, t_lse_ptr, E
        )
        next_s, next_t = words_of(s_bits_ptr, event + 1, E, W_s, s_at), words_of(t_bits_ptr, event + 1, E, W_t, t_at)
        if known:
            s_base = row_of(student_ptr, s_row, T_s, s_stride_b, s_stride_t)
            t_base = row_of(teacher_ptr, t_row, T_t, t_stride_b, t_stride_t)
            live = ((s_word >> (s_at & 31)) & 1) != 0
            q = probabilities(s_base, x, live, scale, s_lse)
            t_live = ((t_word >> (t_at & 31)) & 1) != 0
            p = probabilities(t_base, y, t_live, scale, t_lse)
            of_student, reached = tl.sum(q, axis=AXIS), tl.max(live.to(tl.int32), axis=AXIS)
            of_teacher, t_reached = tl.sum(p, axis=AXIS), tl.max(t_live.to(tl.int32), axis=AXIS)
            store_terms(of_student, reached, of_teacher, t_reached, m, there, block, event, E, M, results, s_row, FORM)
        known, s_row, t_row, s_lse, t_lse = next_known, next_s_row, next_t_row, next_s_lse, next_t_lse
        s_word, t_word = next_s, next_t


@triton.jit
def compare_wide(
    sides,
    starts,
    tokens,
    results,
    shape,
    block_ptr,
    block,
    first_event,
    scale,
    TILE: tl.constexpr,
    EVENTS: tl.constexpr,
    FORM: tl.constexpr,
):
    """Compare a wide class at some starts."""
    student_ptr, teacher_ptr, s_bits_ptr, t_bits_ptr = sides
    chunk_ptr, student_row_ptr, teacher_row_ptr, s_lse_ptr, t_lse_ptr = starts
    s_token_ptr, t_token_ptr = tokens
    E, M, T_s, T_t, W_s, W_t, s_stride_b, s_stride_t, t_stride_b, t_stride_t = shape
    m = tl.load(block_ptr + 1) + tl.arange(0, 1)
    s_first, t_first = tl.load(block_ptr + 3), tl.load(block_ptr + 4)
    s_count, t_count = tl.load(block_ptr + 5), tl.load(block_ptr + 6)
    for i in range(EVENTS):
        event = first_event + i
        known, s_row, t_row, s_lse, t_lse = start_of(
            event, chunk_ptr, student_row_ptr, teacher_row_ptr, s_lse_ptr, t_lse_ptr, E
        )
        if known:
            s_base = row_of(student_ptr, s_row, T_s, s_stride_b, s_stride_t)
            t_base = row_of(teacher_ptr, t_row, T_t, t_stride_b, t_stride_t)
            s_bits, t_bits = s_bits_ptr + event.to(tl.int64) * W_s, t_bits_ptr + event.to(tl.int64) * W_t
            # One class of any size: lanes add up entries TILE apart, and the class is the sum of the lanes.
            p, q = tl.zeros((TILE,), dtype=tl.float32), tl.zeros((TILE,), dtype=tl.float32)
            reached, t_reached = tl.zeros((TILE,), dtype=tl.int32), tl.zeros((TILE,), dtype=tl.int32)
            for begin in range(0, tl.maximum(s_count, t_count), TILE):
                entry = begin + tl.arange(0, TILE)
                x = tl.load(s_token_ptr + s_first + entry, mask=entry < s_count, other=0)
                live = is_live(s_bits, s_first + entry, entry < s_count)
                y = tl.load(t_token_ptr + t_first + entry, mask=entry < t_count, other=0)
                t_live = is_live(t_bits, t_first + entry, entry < t_count)
                q += probabilities(s_base, x, live, scale, s_lse)
                p += probabilities(t_base, y, t_live, scale, t_lse)
                reached, t_reached = reached | live.to(tl.int32), t_reached | t_live.to(tl.int32)
            none = tl.zeros((1,), dtype=tl.float32)
            store_terms(
                none + tl.sum(q, axis=0),
                none.to(tl.int32) + tl.max(reached, axis=0),
                none + tl.sum(p, axis=0),
                none.to(tl.int32) + tl.max(t_reached, axis=0),
                m,
                m >= 0,
                block,
                event,
                E,
                M,
                results,
                s_row,
                FORM,
            )


@triton.jit(do_not_specialize=["E", "T_s", "T_t"])
def chain_class_kernel(
    student_ptr,
    teacher_ptr,
    chunk_ptr,
    student_row_ptr,
    teacher_row_ptr,
    s_bits_ptr,
    t_bits_ptr,
    s_lse_ptr,
    t_lse_ptr,
    blocks_ptr,
    s_token_ptr,
    t_token_ptr,
    ratio_ptr,
    terms_ptr,
    generated_ptr,
    blocks,
    E,
    M,
    T_s,
    T_t,
    W_s,
    W_t,
    s_stride_b,
    s_stride_t,
    t_stride_b,
    t_stride_t,
    scale,
    H_0: tl.constexpr,
    H_1: tl.constexpr,
    H_2: tl.constexpr,
    L_0: tl.constexpr,
    L_1: tl.constexpr,
    L_2: tl.constexpr,
    L_3: tl.constexpr,
    TILE: tl.constexpr,
    EVENTS: tl.constexpr,
    FORM: tl.constexpr,
):
    """Compute the terms of one block of classes at some starts."""
    first, block = tl.program_id(0) // blocks * EVENTS, tl.program_id(0) % blocks
    own_ptr = blocks_ptr + block * 7
    kind = tl.load(own_ptr)
    sides = student_ptr, teacher_ptr, s_bits_ptr, t_bits_ptr
    starts = chunk_ptr, student_row_ptr, teacher_row_ptr, s_lse_ptr, t_lse_ptr
    tokens = s_token_ptr, t_token_ptr
    to = ratio_ptr, terms_ptr, generated_ptr
    shape = E, M, T_s, T_t, W_s, W_t, s_stride_b, s_stride_t, t_stride_b, t_stride_t
    # A kind is compiled with its own tile, so that no lane of a small class waits for a large one.
    if kind == 0:
        compare_tiles(sides, starts, tokens, to, shape, own_ptr, block, first, scale, H_0, TILE // H_0, 0, EVENTS, FORM)
    elif kind == 1:
        compare_tiles(sides, starts, tokens, to, shape, own_ptr, block, first, scale, H_1, TILE // H_1, 0, EVENTS, FORM)
    elif kind == 2:
        compare_tiles(sides, starts, tokens, to, shape, own_ptr, block, first, scale, H_2, TILE // H_2, 0, EVENTS, FORM)
    elif kind == 3:
        compare_tiles(sides, starts, tokens, to, shape, own_ptr, block, first, scale, TILE // L_0, L_0, 1, EVENTS, FORM)
    elif kind == 4:
        compare_tiles(sides, starts, tokens, to, shape, own_ptr, block, first, scale, TILE // L_1, L_1, 1, EVENTS, FORM)
    elif kind == 5:
        compare_tiles(sides, starts, tokens, to, shape, own_ptr, block, first, scale, TILE // L_2, L_2, 1, EVENTS, FORM)
    elif kind == 6:
        compare_tiles(sides, starts, tokens, to, shape, own_ptr, block, first, scale, TILE // L_3, L_3, 1, EVENTS, FORM)
    else:
        compare_wide(sides, starts, tokens, to, shape, own_ptr, block, first, scale, TILE, EVENTS, FORM)
