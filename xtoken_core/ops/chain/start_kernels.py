"""The Triton kernels of the chain divergence at the starts of chunks, with the student's cross-entropy.

A side's *whole* sum is over all tokens of its table, its *live* one over those that can follow the other side's cut. A
sum of exponentials is kept as a pair: the largest logit, and the sum of `exp(logit - largest)`.
"""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.chain.form_kernels import LOG_TINY, is_generated

LOG2_E = tl.constexpr(1.4426950408889634)
ADJACENT = tl.constexpr(8)
"""Columns of a lane: 16 bytes of bfloat16, and a part of a word of bits."""
FEW_LIVE = tl.constexpr(1e-25)
"""A live sum below this fraction of its row's largest exponential is computed again with a pivot of its own."""


@triton.jit
def exp(x):
    """Return `exp(x)` by the power of 2, which takes one instruction; what is below the smallest normal number is 0."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def in_64_bits(i):
    """Return an index in 64 bits, also one that a loop counts."""
    return tl.program_id(0).to(tl.int64) * 0 + i


@triton.jit
def row_of(logits_ptr, row, T, stride_b, stride_t):
    """Return the first logit of a position of the flattened batch; a division in 32 bits is a fifth of one in 64."""
    row = in_64_bits(row).to(tl.int32)
    return logits_ptr + in_64_bits(row // T) * stride_b + in_64_bits(row % T) * stride_t


@triton.jit
def is_live(bits_ptr, x, there):
    """Return which tokens' bits are set; False where `there` is."""
    word = tl.load(bits_ptr + (x >> 5), mask=there, other=0)
    return ((word >> (x & 31)) & 1) != 0


@triton.jit
def finite(top):
    """Return a pivot for exponentials: 0 for -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def sum_over_lanes(top, total):
    """Return the pair of a row from those of lanes."""
    highest = finite(tl.max(top, axis=0))
    return highest, tl.sum(total * exp(top - highest), axis=0)


@triton.jit
def columns_of(begin, LANES: tl.constexpr):
    """Return the columns of a tile, `[LANES, ADJACENT]`: a lane reads adjacent ones, and changes its pivot once."""
    return begin + tl.arange(0, LANES)[:, None] * ADJACENT + tl.arange(0, ADJACENT)[None, :]


@triton.jit
def live_words(bits_ptr, begin, V, LANES: tl.constexpr):
    """Return the bits of a tile's columns, a word per lane that begins with them; a lane's bits lie in one word."""
    first = begin + tl.arange(0, LANES) * ADJACENT
    return tl.load(bits_ptr + (first >> 5), mask=first < V, other=0) >> (first & 31)


@triton.jit
def bits_of(word, x, V):
    """Return which of a tile's columns have their bit set."""
    return (x < V) & (((word[:, None] >> tl.arange(0, ADJACENT)[None, :]) & 1) != 0)


@triton.jit
def live_of(bits_ptr, begin, x, V, LANES: tl.constexpr):
    """Return which of a tile's columns are live."""
    return bits_of(live_words(bits_ptr, begin, V, LANES), x, V)


@triton.jit
def raised(top, z):
    """Return the largest logits so far of lanes, pivots for their exponentials, and the factor of older sums."""
    new = tl.maximum(top, tl.max(z, axis=1))  # [LANES], of a tile [LANES, ADJACENT]
    pivot = finite(new)
    return new, pivot, exp(top - pivot)


@triton.jit
def row_sum(base, first, V, top, total, LANES: tl.constexpr):
    """Add the exponentials of the logits from `first` to `V` to the pairs of lanes."""
    for begin in range(first, V, LANES * ADJACENT):
        x = columns_of(begin, LANES)
        z = tl.load(base + x, mask=x < V, other=float("-inf")).to(tl.float32)
        top, pivot, shrink = raised(top, z)
        total = total * shrink + tl.sum(exp(z - pivot[:, None]), axis=1)
    return top, total


@triton.jit
def live_log_sum(base, bits_ptr, V, scale, LANES: tl.constexpr):
    """Return `log sum exp` of a row's live logits, with a pivot of their own."""
    top = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((LANES,), dtype=tl.float32)
    for begin in range(0, V, LANES * ADJACENT):
        x = columns_of(begin, LANES)
        live = live_of(bits_ptr, begin, x, V, LANES)
        z = tl.load(base + x, mask=live, other=float("-inf")).to(tl.float32) * scale
        top, pivot, shrink = raised(top, z)
        total = total * shrink + tl.sum(exp(z - pivot[:, None]), axis=1)
    highest, whole = sum_over_lanes(top, total)
    return tl.log(whole) + highest


@triton.jit(do_not_specialize=["reads", "T"])
def chain_teacher_kernel(
    logits_ptr,
    event_ptr,
    read_ptr,
    reads,
    bits_ptr,
    top_ptr,
    total_ptr,
    lse_ptr,
    T,
    V,
    W,
    stride_b,
    stride_t,
    scale,
    LANES: tl.constexpr,
):
    """Compute the whole sum of one row of the teacher that anything reads, and the live one where a chunk starts."""
    row = tl.program_id(0)
    event = tl.load(event_ptr + row)
    before = tl.load(read_ptr + row - 1, mask=(row > 0) & (row - 1 < reads), other=-1)  # a node before reads this row
    wanted = (event >= 0) | (before >= 0)
    if wanted:
        # A start reads the live bits of its chunk; a row that only a node reads has none, and `compared` 0 masks them.
        base = row_of(logits_ptr, row, T, stride_b, stride_t)
        bits = bits_ptr + tl.maximum(event, 0).to(tl.int64) * W
        compared = tl.where(event >= 0, V, 0)
        top = tl.full((LANES,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((LANES,), dtype=tl.float32)
        alive = tl.zeros((LANES,), dtype=tl.float32)
        for begin in range(0, V, LANES * ADJACENT):
            x = columns_of(begin, LANES)
            z = tl.load(base + x, mask=x < V, other=float("-inf")).to(tl.float32) * scale
            live = live_of(bits, begin, x, compared, LANES)
            # Online softmax: older sums are rescaled to the new pivot.
            top, pivot, shrink = raised(top, z)
            e = exp(z - pivot[:, None])
            total = total * shrink + tl.sum(e, axis=1)
            alive = alive * shrink + tl.sum(tl.where(live, e, 0.0), axis=1)
        highest, whole = sum_over_lanes(top, total)
        tl.store(top_ptr + row, highest)
        tl.store(total_ptr + row, whole)
        if event >= 0:
            # The live sum has the pivot of the whole row, far below which it has no digits left.
            _, part = sum_over_lanes(top, alive)
            lse = tl.log(part) + highest
            if part < FEW_LIVE:
                lse = live_log_sum(base, bits, V, scale, LANES)
            tl.store(lse_ptr + event, lse)


@triton.jit
def compare_plain(z, x, V, t_base, partner_ptr, both, scale, t_lse):
    """Return the teacher's probability of plain classes live on both sides, times its log ratio; itself; its log."""
    # `both` is False where the class is not plain (the partner is negative), so that no address is formed from it.
    y = tl.load(partner_ptr + x, mask=x < V, other=0)  # all of them: wide loads
    log_p = tl.load(t_base + y, mask=both, other=float("-inf")).to(tl.float32) * scale - t_lse
    p = exp(log_p)
    return tl.where(p > 0.0, p * (log_p - z), 0.0), p, tl.maximum(log_p, LOG_TINY)  # 0 * -inf = 0


@triton.jit
def exact_plain(
    base, t_base, partner_ptr, bits, t_bits, V, scale, s_lse, t_lse, generated, LANES: tl.constexpr, FORM: tl.constexpr
):
    """Return the KL over plain classes, their mass, and that not below the floor, with floored logarithms.

    Of generated text they are the sums of the first pass (`terms_of`).
    """
    kl = tl.zeros((LANES,), dtype=tl.float32)
    mass = tl.zeros((LANES,), dtype=tl.float32)
    unclipped = tl.zeros((LANES,), dtype=tl.float32)
    for begin in range(0, V, LANES * ADJACENT):
        x = columns_of(begin, LANES)
        live = live_of(bits, begin, x, V, LANES)
        both = live & live_of(t_bits, begin, x, V, LANES)
        log_q = tl.load(base + x, mask=live, other=0.0).to(tl.float32) * scale - s_lse
        term, p, log_p = compare_plain(tl.maximum(log_q, LOG_TINY), x, V, t_base, partner_ptr, both, scale, t_lse)
        kept = tl.where(log_q >= LOG_TINY, p, 0.0)
        if FORM != 0.0:
            q = tl.where(both, exp(log_q), 0.0)
            term, kept = (
                tl.where(generated, q * (tl.maximum(log_q, LOG_TINY) - log_p), term),
                tl.where(generated, q, kept),
            )
        kl += tl.sum(term, axis=1)
        mass += tl.sum(p, axis=1)
        unclipped += tl.sum(kept, axis=1)
    return tl.sum(kl, axis=0), tl.sum(mass, axis=0), tl.sum(unclipped, axis=0)


@triton.jit
def store_start(
    rows,
    bits,
    V,
    scale,
    t_lse,
    highest,
    lanes,
    event,
    E,
    s_lse_ptr,
    terms_ptr,
    generated,
    LANES: tl.constexpr,
    FORM: tl.constexpr,
):
    """Store the live sum of a row, and the terms of its plain classes, from the sums of lanes."""
    base, t_base, partner_ptr = rows
    s_bits, t_bits = bits
    top, alive, kl, mass, lowest, reach = lanes
    _, part = sum_over_lanes(top, alive)
    s_lse = tl.log(part) + highest
    if part < FEW_LIVE:
        s_lse = live_log_sum(base, s_bits, V, scale, LANES)
    # Added up was p (log p - z), for lack of the student's sum; log q is z - s_lse.
    of_plain = tl.sum(mass, axis=0)
    value, unclipped = tl.sum(kl, axis=0) + s_lse * of_plain, of_plain
    # Some log q is below its floor: the row is read again, now that s_lse is known.
    again = tl.min(lowest, axis=0) - s_lse < LOG_TINY
    if FORM != 0.0:
        _, own_reach = sum_over_lanes(top, reach)
        _, own_kl = sum_over_lanes(top, kl)
        value = tl.where(generated, -(own_kl + s_lse * own_reach) / part, value)
        unclipped = tl.where(generated, own_reach / part, unclipped)
        again = tl.where(generated, part < FEW_LIVE, again)  # these sums have few digits, like that of live tokens
    if again:
        value, _, unclipped = exact_plain(
            base, t_base, partner_ptr, s_bits, t_bits, V, scale, s_lse, t_lse, generated, LANES, FORM
        )
    tl.store(s_lse_ptr + event, s_lse)
    tl.store(terms_ptr + event, value)
    tl.store(terms_ptr + E + event, of_plain)
    tl.store(terms_ptr + 2 * E + event, unclipped)


@triton.jit
def store_cross_entropy(base, row, target, top, total, losses_ptr, hits_ptr, head_lse_ptr, LANES: tl.constexpr):
    """Store a row's cross-entropy, and whether the target is the first of the largest logits."""
    highest, whole = sum_over_lanes(top, total)
    lse = tl.log(whole) + highest
    own = tl.load(base + target).to(tl.float32)
    hit = own >= tl.max(top, axis=0)
    # A tie counts for the lowest id: nothing before the target may be as large.
    if hit:
        before = tl.full((LANES,), float("-inf"), dtype=tl.float32)
        for begin in range(0, target.to(tl.int32), LANES * ADJACENT):
            x = columns_of(begin, LANES)
            z = tl.load(base + x, mask=x < target, other=float("-inf")).to(tl.float32)
            before = tl.maximum(before, tl.max(z, axis=1))
        hit = tl.max(before, axis=0) < own
    tl.store(head_lse_ptr + row, lse)
    tl.store(losses_ptr + row, lse - own)
    tl.store(hits_ptr + row, hit)


@triton.jit(do_not_specialize=["E", "T_s", "T_t"], do_not_specialize_on_alignment=["targets_ptr"])
def chain_student_kernel(
    student_ptr,
    teacher_ptr,
    targets_ptr,
    event_ptr,
    teacher_row_ptr,
    s_bits_ptr,
    t_bits_ptr,
    partner_ptr,
    t_lse_ptr,
    losses_ptr,
    hits_ptr,
    head_lse_ptr,
    top_ptr,
    total_ptr,
    s_lse_ptr,
    terms_ptr,
    generated_ptr,
    E,
    T_s,
    T_t,
    V_head,
    V,
    W,
    s_stride_b,
    s_stride_t,
    t_stride_b,
    t_stride_t,
    scale,
    TARGETS: tl.constexpr,
    UNSCALED: tl.constexpr,
    LANES: tl.constexpr,
    FORM: tl.constexpr,
):
    """Compute one student row: cross-entropy, its sums, and the KL over plain classes where a chunk starts."""
    row = tl.program_id(0)
    base = row_of(student_ptr, row, T_s, s_stride_b, s_stride_t)
    event = tl.load(event_ptr + row)
    # Without a start every bit is masked, and the same loop adds up the whole row alone.
    compared = tl.where(event >= 0, V, 0)
    at = tl.maximum(event, 0)
    bits, t_bits = s_bits_ptr + at.to(tl.int64) * W, t_bits_ptr + at.to(tl.int64) * W
    t_base = row_of(teacher_ptr, tl.load(teacher_row_ptr + at), T_t, t_stride_b, t_stride_t)
    t_lse = tl.load(t_lse_ptr + at, mask=event >= 0, other=0.0)
    top = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((LANES,), dtype=tl.float32)
    alive = tl.zeros((LANES,), dtype=tl.float32)
    kl = tl.zeros((LANES,), dtype=tl.float32)
    mass = tl.zeros((LANES,), dtype=tl.float32)
    lowest = tl.full((LANES,), float("inf"), dtype=tl.float32)
    reach, generated = 0.0, False
    if FORM != 0.0:
        reach = tl.zeros((LANES,), dtype=tl.float32)
        generated = is_generated(generated_ptr, row, FORM)
    for begin in range(0, V, LANES * ADJACENT):
        x = columns_of(begin, LANES)
        z = tl.load(base + x, mask=x < V, other=float("-inf")).to(tl.float32) * scale
        word = live_words(bits, begin, compared, LANES)
        live = bits_of(word, x, compared)
        both = bits_of(word & live_words(t_bits, begin, compared, LANES), x, compared)
        term, p, log_p = compare_plain(z, x, compared, t_base, partner_ptr, both, scale, t_lse)
        # The student's sums have the student's pivot; the KL and its mass need none, since t_lse is known.
        top, pivot, shrink = raised(top, z)
        e = exp(z - pivot[:, None])
        total = total * shrink + tl.sum(e, axis=1)
        alive = alive * shrink + tl.sum(tl.where(live, e, 0.0), axis=1)
        if FORM != 0.0:
            # In generated text e is the weight, whose pivot may change.
            of_both = tl.where(both, e, 0.0)
            weight = tl.where(generated, of_both, p)
            term = tl.where(weight > 0.0, weight * (log_p - z), 0.0)
            kl = kl * tl.where(generated, shrink, 1.0)
            reach = reach * shrink + tl.sum(of_both, axis=1)
        kl += tl.sum(term, axis=1)
        mass += tl.sum(p, axis=1)
        lowest = tl.minimum(lowest, tl.min(tl.where(p > 0.0, z, float("inf")), axis=1))
    highest, whole = sum_over_lanes(top, total)
    tl.store(top_ptr + row, highest)
    tl.store(total_ptr + row, whole)
    if event >= 0:
        rows, lanes = (base, t_base, partner_ptr), (top, alive, kl, mass, lowest, reach)
        store_start(
            rows,
            (bits, t_bits),
            V,
            scale,
            t_lse,
            highest,
            lanes,
            event,
            E,
            s_lse_ptr,
            terms_ptr,
            generated,
            LANES,
            FORM,
        )
    if TARGETS:
        target = tl.load(targets_ptr + row)
        # At temperature 1 the sums over the table's tokens begin the head's: only the columns behind are to be read.
        first = V
        if not UNSCALED:
            first = 0
            top = tl.full((LANES,), float("-inf"), dtype=tl.float32)
            total = tl.zeros((LANES,), dtype=tl.float32)
        top, total = row_sum(base, first, V_head, top, total, LANES)
        store_cross_entropy(base, row, target, top, total, losses_ptr, hits_ptr, head_lse_ptr, LANES)
