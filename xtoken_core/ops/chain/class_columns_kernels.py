"""The Triton kernel of classes that are not plain, in the columns of `xtoken_core.chain.class_columns`."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from triton.language.extra import libdevice  # type: ignore[import-untyped]

from xtoken_core.ops.chain.start_kernels import LOG2_E, TINY, row_of

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def log_2(x, FAST: tl.constexpr):
    """Return the logarithm to base 2 of normal numbers; `FAST`: by the one instruction that there is for it."""
    return libdevice.fast_log2f(x) if FAST else tl.log2(x)


@triton.jit
def row_sums(
    base, bits, lse, scale, token_ptr, at, total, reached, lane, CACHE: tl.constexpr
):  # fmt: skip
    """Add a row of a block's probabilities, and the bits of its tokens, to those of the rows before, by start.

    `scale` and `lse` are those of powers of 2.
    """
    x = tl.load(token_ptr + at + lane)
    word = tl.load(bits + ((at >> 5) + (lane >> 5))[None, :])
    live = (word & (1 << (lane & 31))[None, :]) != 0
    z = tl.load(base + x[None, :], mask=live, other=float("-inf"), cache_modifier=CACHE).to(tl.float32)
    return total + tl.exp2(z * scale - lse), reached | word


@triton.jit
def column_sums(
    base, bits, lse, scale, token_ptr, first, rows, lane, EVENTS: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr, CACHE: tl.constexpr
):  # fmt: skip
    """Return the sums of a block's columns, `[EVENTS, LANES]`, and the bits that are set in any row."""
    total = tl.zeros((EVENTS, LANES), dtype=tl.float32)
    reached = tl.zeros((EVENTS, LANES), dtype=tl.int32)
    if ROWS > 0:
        for row in tl.static_range(ROWS):
            total, reached = row_sums(
                base, bits, lse, scale, token_ptr, first + row * LANES, total, reached, lane, CACHE
            )
    else:
        for row in range(rows):
            total, reached = row_sums(
                base, bits, lse, scale, token_ptr, first + row * LANES, total, reached, lane, CACHE
            )
    return total, (reached & (1 << (lane & 31))[None, :]) != 0


@triton.jit
def class_sum(values, WIDTH: tl.constexpr, EVENTS: tl.constexpr, LANES: tl.constexpr):
    """Return the sums of adjacent lanes, `[EVENTS, LANES / WIDTH]`."""
    if WIDTH > 1:
        values = tl.sum(tl.reshape(values, (EVENTS, LANES // WIDTH, WIDTH)), axis=2)
    return values


@triton.jit(do_not_specialize=["first_task", "tasks", "E", "T_s", "T_t"])
def chain_class_columns_kernel(
    student_ptr, teacher_ptr, chunk_ptr, student_row_ptr, teacher_row_ptr, s_bits_ptr, t_bits_ptr, s_lse_ptr, t_lse_ptr,
    tasks_ptr, table_ptr, s_token_ptr, t_token_ptr, ratio_ptr, terms_ptr, first_task, tasks, E, M, T_s, T_t, W_s, W_t,
    s_stride_b, s_stride_t, t_stride_b, t_stride_t, scale,
    WIDTH: tl.constexpr, STUDENT_ROWS: tl.constexpr, TEACHER_ROWS: tl.constexpr, EVENTS: tl.constexpr,
    LANES: tl.constexpr, FAST: tl.constexpr, CACHE: tl.constexpr
):  # fmt: skip
    """Compute the terms of one task at some starts, and the ratios of its classes."""
    task = first_task + tl.program_id(0) % tasks
    event = tl.program_id(0) // tasks * EVENTS + tl.arange(0, EVENTS)
    known = event < E
    known = known & (tl.load(chunk_ptr + event, mask=known, other=-1) >= 0)
    if tl.max(known.to(tl.int32), axis=0) > 0:
        s_base = row_of(student_ptr, tl.load(student_row_ptr + event, mask=known, other=0), T_s, s_stride_b, s_stride_t)
        t_base = row_of(teacher_ptr, tl.load(teacher_row_ptr + event, mask=known, other=0), T_t, t_stride_b, t_stride_t)
        s_lse = tl.load(s_lse_ptr + event, mask=known, other=0.0) * LOG2_E
        t_lse = tl.load(t_lse_ptr + event, mask=known, other=0.0) * LOG2_E
        scale *= LOG2_E
        wide = event.to(tl.int64)
        s_bits, t_bits = s_bits_ptr + tl.where(known, wide, 0) * W_s, t_bits_ptr + tl.where(known, wide, 0) * W_t
        ratios = ratio_ptr + wide * M
        lane = tl.arange(0, LANES)
        of_class = tl.arange(0, LANES // WIDTH)
        kl = tl.zeros((EVENTS, LANES // WIDTH), dtype=tl.float32)
        mass = tl.zeros((EVENTS, LANES // WIDTH), dtype=tl.float32)
        unclipped = tl.zeros((EVENTS, LANES // WIDTH), dtype=tl.float32)
        for block in range(tl.load(tasks_ptr + task * 2), tl.load(tasks_ptr + task * 2 + 1)):
            own_ptr = table_ptr + block * 6
            m = tl.load(own_ptr) + of_class
            there = m < tl.load(own_ptr + 1)
            q, alive = column_sums(
                s_base[:, None], s_bits[:, None], s_lse[:, None], scale, s_token_ptr, tl.load(own_ptr + 2),
                tl.load(own_ptr + 4), lane, EVENTS, LANES, STUDENT_ROWS, ""
            )  # fmt: skip
            p, _ = column_sums(
                t_base[:, None], t_bits[:, None], t_lse[:, None], scale, t_token_ptr, tl.load(own_ptr + 3),
                tl.load(own_ptr + 5), lane, EVENTS, LANES, TEACHER_ROWS, CACHE
            )  # fmt: skip
            q, p = class_sum(q, WIDTH, EVENTS, LANES), class_sum(p, WIDTH, EVENTS, LANES)
            if WIDTH > 1:
                alive = class_sum(alive.to(tl.int32), WIDTH, EVENTS, LANES) > 0
            p = tl.where(alive & known[:, None], p, 0.0)
            floored = tl.maximum(q, TINY)
            kl += p * (log_2(tl.maximum(p, TINY), FAST) - log_2(floored, FAST))
            mass += p
            p = tl.where(q >= TINY, p, 0.0)
            unclipped += p
            ratio = (p / floored).to(ratio_ptr.dtype.element_ty)
            tl.store(ratios[:, None] + m[None, :], ratio, mask=known[:, None] & there[None, :])
        terms = terms_ptr + (task + 1).to(tl.int64) * 3 * E + event  # the first three rows are those of plain classes
        tl.store(terms, tl.sum(kl, axis=1) * LN_2, mask=known)
        tl.store(terms + E, tl.sum(mass, axis=1), mask=known)
        tl.store(terms + 2 * E, tl.sum(unclipped, axis=1), mask=known)
