"""The Triton kernels of a teacher's listed tokens at the starts of chunks: who can follow, by class, and the KL.

A row's listed tokens are its *entries*, in the order of their classes. The first entry of a class stands for all of it:
the *head* of the class. A class without a listed token that can follow has no head.
"""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.chain.form_kernels import SUMS, TINY, is_generated, terms_of, value_of
from xtoken_core.ops.chain.live_kernels import is_conditioned
from xtoken_core.ops.chain.start_kernels import exp, in_64_bits, is_live, row_of

KEPT = tl.constexpr(1)
JOINED = tl.constexpr(2)
"""States of pairs of tokens; see `xtoken_core.chain.word_splits`."""


@triton.jit
def excluded_by_rules(
    position,
    before,
    point_ptr,
    low_ptr,
    high_ptr,
    rule_start_ptr,
    tail_start_ptr,
    tail_count_ptr,
    right_ptr,
    depth,
    RULES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Return which tokens the rules of the token before exclude, by the tokens' positions."""
    excluded = tl.zeros((LANES,), dtype=tl.int32)  # [LANES], an entry each
    at = before.to(tl.int32)
    start = tl.load(rule_start_ptr + at)
    count = tl.load(rule_start_ptr + at + 1) - start
    for _ in range(depth + 1):
        for begin in range(0, count, RULES):
            rule = begin + tl.arange(0, RULES)
            there = rule < count
            # [RULES, 1] beside the entries' positions [1, LANES].
            point = tl.load(point_ptr + start + rule, mask=there, other=-1)[:, None]
            low = tl.load(low_ptr + start + rule, mask=there, other=0)[:, None]
            high = tl.load(high_ptr + start + rule, mask=there, other=0)[:, None]
            own = position[None, :]
            inside = (point == own) | ((low <= own) & (own < high))
            excluded = tl.maximum(excluded, tl.max(inside.to(tl.int32), axis=0))
        # Behind the token's own rules those of the tokens of its right spine (`live._slices`).
        known = tl.maximum(at, 0)
        start = tl.load(tail_start_ptr + known)
        count = tl.where(at >= 0, tl.load(tail_count_ptr + known), 0)
        at = tl.where(at >= 0, tl.load(right_ptr + known), -1)
    return excluded != 0


@triton.jit
def chain_entry_kernel(
    id_ptr,
    log_prob_ptr,
    tail_ptr,
    chunk_ptr,
    t_row_ptr,
    before_ptr,
    token_ptr,
    at_cut_ptr,
    tail_of_ptr,
    head_ptr,
    state_ptr,
    position_ptr,
    point_ptr,
    low_ptr,
    high_ptr,
    rule_start_ptr,
    tail_start_ptr,
    tail_count_ptr,
    right_ptr,
    p_ptr,
    rest_ptr,
    heads,
    depth,
    V,
    K,
    CONDITIONING: tl.constexpr,
    RULES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Store the teacher's probability of every entry of one start, -1 for one that cannot follow, and of the rest."""
    event = tl.program_id(0)
    if tl.load(chunk_ptr + event) >= 0:
        row = tl.load(t_row_ptr + event).to(tl.int64)
        j = tl.arange(0, LANES)  # all entries of the row
        token = tl.load(id_ptr + row * K + j, mask=j < K, other=V)
        live = token < V
        known = tl.where(live, token, 0)
        if is_conditioned(at_cut_ptr, event, CONDITIONING) != 0:
            before = tl.load(before_ptr + event)
            state_ptr += tl.load(tail_of_ptr + before).to(tl.int64) * heads
            state = tl.load(state_ptr + tl.load(head_ptr + known)).to(tl.int32)
            of_beginning = tl.maximum(state - JOINED, 0) * V  # [LANES], the row of the beginning that the state names
            excluded = excluded_by_rules(
                tl.load(position_ptr + of_beginning + known),
                before,
                point_ptr,
                low_ptr,
                high_ptr,
                rule_start_ptr,
                tail_start_ptr,
                tail_count_ptr,
                right_ptr,
                depth,
                RULES,
                LANES,
            )
            follows = (state == KEPT) | ((state >= JOINED) & (excluded == 0))
            own = token == tl.load(token_ptr + event).to(tl.int32)  # it can follow: it does
            live = live & (follows | own)
        # Renormalise over the entries that can follow and the tail. If nothing of either is left, all is in the rest.
        mass = tl.where(live, exp(tl.load(log_prob_ptr + row * K + j, mask=live, other=float("-inf"))), 0.0)
        tail = tl.load(tail_ptr + row)
        total = tl.sum(mass, axis=0) + tail
        divisor = tl.maximum(total, TINY)
        tl.store(p_ptr + in_64_bits(event) * K + j, tl.where(live, mass / divisor, -1.0), mask=j < K)
        tl.store(rest_ptr + event, tl.where(total < TINY, 1.0, tail / divisor))


@triton.jit
def tokens_of_classes(i, there, class_ptr, class_start_ptr):
    """Return where the student's tokens of entries' classes begin, and how many there are; none if not `there`."""
    cls = tl.load(class_ptr + i, mask=there, other=0)
    first = tl.load(class_start_ptr + cls, mask=there, other=0)
    return first, tl.load(class_start_ptr + cls + 1, mask=there, other=0) - first


@triton.jit
def chain_head_kernel(
    class_ptr,
    p_ptr,
    chunk_ptr,
    t_row_ptr,
    class_start_ptr,
    class_token_ptr,
    heads_ptr,
    rest_bits_ptr,
    groups,
    W,
    K,
    ENTRIES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Store the teacher's probability of the classes of some entries at their heads, -1 at other entries.

    The bits of the student's tokens of these classes are cleared.
    """
    event, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    if tl.load(chunk_ptr + event) >= 0:
        class_ptr += tl.load(t_row_ptr + event).to(tl.int64) * K
        p_ptr += in_64_bits(event) * K
        heads_ptr += in_64_bits(event) * K
        rest_bits_ptr += in_64_bits(event) * W
        i = group * ENTRIES + tl.arange(0, ENTRIES)
        # Different values stand for what does not exist on each side of a comparison, so that none of them are equal.
        cls = tl.load(class_ptr + i, mask=i < K, other=-2)
        before = tl.load(class_ptr + i - 1, mask=(i > 0) & (i < K), other=-1)
        # [ENTRIES, LANES]: some entries with all others, LANES at once, whose class is the same.
        total = tl.zeros((ENTRIES,), dtype=tl.float32)
        some = tl.zeros((ENTRIES,), dtype=tl.int32)
        for begin in range(0, K, LANES):
            j = begin + tl.arange(0, LANES)
            p = tl.load(p_ptr + j, mask=j < K, other=-1.0)[None, :]
            of_class = (tl.load(class_ptr + j, mask=j < K, other=-3)[None, :] == cls[:, None]) & (p >= 0.0)
            total += tl.sum(tl.where(of_class, p, 0.0), axis=1)
            some = tl.maximum(some, tl.max(of_class.to(tl.int32), axis=1))
        head = (i < K) & (cls != before) & (some != 0)
        tl.store(heads_ptr + i, tl.where(head, total, -1.0), mask=i < K)
        first, count = tokens_of_classes(i, head, class_ptr, class_start_ptr)
        for begin in range(0, tl.max(count, axis=0), LANES):
            at = begin + tl.arange(0, LANES)[None, :]
            there = at < count[:, None]
            x = tl.load(class_token_ptr + first[:, None] + at, mask=there, other=0)
            # What is left is the rest: live tokens of the student of whose class no token is listed.
            tl.atomic_and(rest_bits_ptr + (x >> 5), ~((x * 0 + 1) << (x & 31)), mask=there, sem="relaxed")


@triton.jit
def compare_entries(
    row,
    entries,
    rest,
    classes,
    ratio_ptr,
    K,
    generated,
    sums,
    ENTRIES: tl.constexpr,
    LANES: tl.constexpr,
    FORM: tl.constexpr,
):
    """Store the ratios of a start's classes with a head; return the sums of their terms and the rest's, and its ratio.

    Returns:
        Sums of the terms, of the teacher's mass and of the gradient's (`terms_of`), and the ratio of the rest.
    """
    base, bits_ptr, s_lse, scale = row
    class_ptr, heads_ptr = entries
    class_start_ptr, class_token_ptr = classes
    value = tl.zeros((ENTRIES,), dtype=tl.float32)
    mass = tl.zeros((ENTRIES,), dtype=tl.float32)
    of_mass = tl.zeros((ENTRIES,), dtype=tl.float32)
    for entry in range(0, K, ENTRIES):
        i = entry + tl.arange(0, ENTRIES)
        p = tl.load(heads_ptr + i, mask=i < K, other=-1.0)
        first, count = tokens_of_classes(i, p >= 0.0, class_ptr, class_start_ptr)
        total = tl.zeros((ENTRIES, LANES), dtype=tl.float32)
        reached = tl.zeros((ENTRIES, LANES), dtype=tl.int32)
        for begin in range(0, tl.max(count, axis=0), LANES):
            at = begin + tl.arange(0, LANES)[None, :]
            there = at < count[:, None]
            x = tl.load(class_token_ptr + first[:, None] + at, mask=there, other=0)
            live = there & is_live(bits_ptr, x, there)
            total += exp(tl.load(base + x, mask=live, other=float("-inf")).to(tl.float32) * scale - s_lse)
            reached = reached | live.to(tl.int32)
        q = tl.sum(total, axis=1)
        alive = (p >= 0.0) & (tl.max(reached, axis=1) != 0)
        p = tl.where(alive, p, 0.0)
        if FORM != 0.0:
            q = tl.where(alive, q, 0.0)
        term, kept, ratio = terms_of(p, q, generated, sums, FORM)
        value += term
        mass += p
        of_mass += kept
        tl.store(ratio_ptr + i, ratio, mask=i < K)
    p, q = rest
    term, kept, ratio = terms_of(p, q, generated, sums, FORM)
    return tl.sum(value, axis=0) + term, tl.sum(mass, axis=0) + p, tl.sum(of_mass, axis=0) + kept, ratio


@triton.jit(do_not_specialize=["T_s"])
def chain_listed_start_kernel(
    student_ptr,
    class_ptr,
    heads_ptr,
    rest_p_ptr,
    chunk_ptr,
    s_row_ptr,
    t_row_ptr,
    bits_ptr,
    s_lse_ptr,
    rest_lse_ptr,
    rest_some_ptr,
    class_start_ptr,
    class_token_ptr,
    value_ptr,
    mass_ptr,
    ratio_ptr,
    rest_ratio_ptr,
    generated_ptr,
    T_s,
    W,
    K,
    stride_b,
    stride_t,
    scale,
    ENTRIES: tl.constexpr,
    LANES: tl.constexpr,
    FORM: tl.constexpr,
):
    """Compute the divergence of one start over the classes with a head and the rest, and the gradient's ratios."""
    event = tl.program_id(0)
    if tl.load(chunk_ptr + event) >= 0:
        s_row, own = tl.load(s_row_ptr + event), in_64_bits(event)
        generated = is_generated(generated_ptr, s_row, FORM)
        s_lse = tl.load(s_lse_ptr + event)
        row = row_of(student_ptr, s_row, T_s, stride_b, stride_t), bits_ptr + own * W, s_lse, scale
        entries = class_ptr + tl.load(t_row_ptr + event).to(tl.int64) * K, heads_ptr + own * K
        classes = class_start_ptr, class_token_ptr
        beyond = tl.load(rest_some_ptr + event) != 0  # the rest is one more class
        p = tl.where(beyond, tl.load(rest_p_ptr + event), 0.0)
        q = tl.where(beyond, exp(tl.load(rest_lse_ptr + event) - s_lse), 0.0)
        rest, ratio_ptr = (p, q), ratio_ptr + own * K
        sums = 0.0, 0.0, 0.0
        # Of classes that the student can reach.
        value, mass, of_mass, ratio = compare_entries(
            row, entries, rest, classes, ratio_ptr, K, generated, sums, ENTRIES, LANES, SUMS if FORM != 0.0 else FORM
        )
        reach = of_mass
        if FORM != 0.0:
            sums = mass, reach, value
            value, mass, of_mass, ratio = compare_entries(
                row, entries, rest, classes, ratio_ptr, K, generated, sums, ENTRIES, LANES, FORM
            )
        tl.store(value_ptr + event, value_of(value, mass, generated, reach, FORM))
        tl.store(mass_ptr + event, of_mass)
        tl.store(rest_ratio_ptr + event, ratio)
