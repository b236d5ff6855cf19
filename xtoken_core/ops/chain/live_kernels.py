"""The Triton kernel of live sets as bits: which tokens can follow a token of the other side."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.chain.start_kernels import in_64_bits


@triton.jit
def copy_words(from_ptr, to_ptr, count, WORDS: tl.constexpr):
    """Copy words."""
    for begin in range(0, count, WORDS):
        at = begin + tl.arange(0, WORDS)
        tl.store(to_ptr + at, tl.load(from_ptr + at, mask=at < count), mask=at < count)


@triton.jit
def change_bit(ptr, x, there, SET: tl.constexpr):
    """Set or clear bits; the order does not matter."""
    # Tokens that share a word are changed by different lanes and programs.
    bit = tl.full((1,), 1, dtype=tl.int32) << (x & 31)
    if SET:
        tl.atomic_or(ptr + (x >> 5), bit, mask=there, sem="relaxed")
    else:
        tl.atomic_and(ptr + (x >> 5), ~bit, mask=there, sem="relaxed")


@triton.jit
def change_bits(own_ptr, plain_ptr, members_ptr, x, second, plain_bits, there, SET: tl.constexpr):
    """Set or clear both bits of tokens."""
    change_bit(own_ptr, x, there, SET)
    change_bit(plain_ptr, second, there & (second >= 0) & (second < plain_bits), SET)
    change_bit(members_ptr, second - plain_bits, there & (second >= plain_bits), SET)


@triton.jit
def is_conditioned(at_cut_ptr, event, CONDITIONING: tl.constexpr):
    """Return 1 if an event's set is conditioned on the other side's cut."""
    conditioned = tl.load(at_cut_ptr + event).to(tl.int32)
    if not CONDITIONING:
        conditioned = conditioned * 0
    return conditioned


@triton.jit
def chain_live_kernel(
    before_ptr,
    token_ptr,
    chunk_ptr,
    at_cut_ptr,
    own_ptr,
    plain_ptr,
    members_ptr,
    base_ptr,
    heavy_ptr,
    stored_ptr,
    tail_ptr,
    second_ptr,
    W,
    W_plain,
    W_members,
    last_row,
    CONDITIONING: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Set the bits of the tokens that can follow one event's last token of the other side, but for its rules."""
    event = tl.program_id(0)
    if tl.load(chunk_ptr + event) >= 0:
        own_ptr += event.to(tl.int64) * W
        plain_ptr += event.to(tl.int64) * W_plain
        members_ptr += event.to(tl.int64) * W_members
        # Without a common cut before the chunk nothing is known of what follows: the last row, with every token.
        w = tl.load(before_ptr + event)
        row = tl.load(heavy_ptr + w)
        conditioned = is_conditioned(at_cut_ptr, event, CONDITIONING)
        all_words = in_64_bits(W + W_plain + W_members)  # also where each is 1, a constant
        from_ptr = base_ptr + tl.where(conditioned != 0, tl.load(tail_ptr + w), last_row) * all_words
        if (conditioned != 0) & (row >= 0):  # too many rules to apply: the set is stored whole
            from_ptr = stored_ptr + row * all_words
        copy_words(from_ptr, own_ptr, W, WORDS)
        copy_words(from_ptr + W, plain_ptr, W_plain, WORDS)
        copy_words(from_ptr + W + W_plain, members_ptr, W_members, WORDS)
        tl.debug_barrier()
        token = tl.load(token_ptr + event + tl.arange(0, 1)).to(tl.int32)  # the text's own token can follow: it does
        second = tl.load(second_ptr + token)
        change_bits(own_ptr, plain_ptr, members_ptr, token, second, W_plain * 32, token >= 0, True)


@triton.jit(do_not_specialize=["heads"])
def chain_clear_kernel(
    before_ptr,
    token_ptr,
    chunk_ptr,
    at_cut_ptr,
    own_ptr,
    plain_ptr,
    members_ptr,
    heavy_ptr,
    tail_ptr,
    joined_ptr,
    position_start_ptr,
    by_position_ptr,
    second_by_position_ptr,
    head_by_position_ptr,
    point_ptr,
    low_ptr,
    high_ptr,
    rule_start_ptr,
    tail_start_ptr,
    tail_count_ptr,
    right_ptr,
    heads,
    W,
    W_plain,
    W_members,
    depth,
    SPLITS: tl.constexpr,
    RULES: tl.constexpr,
    TOKENS: tl.constexpr,
    POINTS: tl.constexpr,
    AT_POINT: tl.constexpr,
):
    """Clear the bits of the tokens that some of the rules of an event's last token exclude, all but its own token's."""
    # The rules of one token are divided among SPLITS programs: clearing bits commutes.
    event, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    w = tl.load(before_ptr + event)
    cut = tl.load(at_cut_ptr + event).to(tl.int32) != 0
    if (tl.load(chunk_ptr + event) >= 0) & cut & (tl.load(heavy_ptr + w) < 0):
        own_ptr += event.to(tl.int64) * W
        plain_ptr += event.to(tl.int64) * W_plain
        members_ptr += event.to(tl.int64) * W_members
        joined_ptr += tl.load(tail_ptr + w) * heads
        sets = own_ptr, plain_ptr, members_ptr, W_plain
        positions = position_start_ptr, by_position_ptr, second_by_position_ptr, head_by_position_ptr
        token = tl.load(token_ptr + event).to(tl.int32)
        at = w.to(tl.int32)
        start = tl.load(rule_start_ptr + w)
        count = tl.load(rule_start_ptr + w + 1) - start
        # First the token's own rules, then those of the tokens of its right spine (`live._slices`).
        for _ in range(depth + 1):
            # A rule excludes the position `point` and the interval from `low` to `high`: two tilings.
            for begin in range(split * POINTS, count, SPLITS * POINTS):
                rule = begin + tl.arange(0, POINTS * AT_POINT) // AT_POINT
                there = rule < count
                point = tl.load(point_ptr + start + rule, mask=there, other=0)
                clear(sets, point, point + 1, there, token, positions, joined_ptr, POINTS, AT_POINT)
            for begin in range(split * RULES, count, SPLITS * RULES):
                rule = begin + tl.arange(0, RULES * TOKENS) // TOKENS
                there = rule < count
                low = tl.load(low_ptr + start + rule, mask=there, other=0)
                high = tl.load(high_ptr + start + rule, mask=there, other=0)
                clear(sets, low, high, there, token, positions, joined_ptr, RULES, TOKENS)
            known = tl.maximum(at, 0)
            start = tl.load(tail_start_ptr + known)
            count = tl.where(at >= 0, tl.load(tail_count_ptr + known), 0)
            at = tl.where(at >= 0, tl.load(right_ptr + known), -1)


@triton.jit
def clear(sets, low, high, there, token, positions, joined_ptr, RULES: tl.constexpr, TOKENS: tl.constexpr):
    """Clear the bits of the tokens in intervals of capacity where the model decides, but for one token's.

    Adjacent lanes have the same interval, `TOKENS` each: in one dimension no tile changes its layout.
    """
    own_ptr, plain_ptr, members_ptr, W_plain = sets
    plain_bits = W_plain * 32
    position_start_ptr, by_position_ptr, second_by_position_ptr, head_by_position_ptr = positions
    first = tl.load(position_start_ptr + low, mask=there, other=0) + tl.arange(0, RULES * TOKENS) % TOKENS
    last = tl.load(position_start_ptr + high, mask=there, other=0)
    for begin in range(0, tl.max(last - first, axis=0), TOKENS):
        at = first + begin
        inside = at < last
        x = tl.load(by_position_ptr + at, mask=inside, other=0)
        second = tl.load(second_by_position_ptr + at, mask=inside, other=-1)
        head = tl.load(head_by_position_ptr + at, mask=inside, other=0)
        joined = tl.load(joined_ptr + head, mask=inside, other=0) != 0
        change_bits(own_ptr, plain_ptr, members_ptr, x, second, plain_bits, inside & joined & (x != token), False)
