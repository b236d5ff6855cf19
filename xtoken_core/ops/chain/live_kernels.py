"""The Triton kernel of live sets as bits: which tokens can follow a token of the other side."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def chain_live_kernel(
    before_ptr, token_ptr, chunk_ptr, at_cut_ptr, bits_ptr, base_ptr, heavy_ptr, stored_ptr, tail_ptr, head_ptr,
    joined_ptr, position_start_ptr, by_position_ptr, point_ptr, low_ptr, high_ptr, rule_start_ptr, tail_start_ptr,
    tail_count_ptr, right_ptr, heads, W, depth, CONDITIONING: tl.constexpr, WORDS: tl.constexpr, RULES: tl.constexpr,
    TOKENS: tl.constexpr
):  # fmt: skip
    """Set the bits of the tokens that can follow one event's last token of the other side."""
    event = tl.program_id(0)
    if tl.load(chunk_ptr + event) >= 0:
        own_ptr = bits_ptr + event.to(tl.int64) * W
        words = tl.arange(0, WORDS)
        w = tl.load(before_ptr + event)
        row = tl.load(heavy_ptr + w)
        tail = tl.load(tail_ptr + w)
        conditioned = tl.load(at_cut_ptr + event).to(tl.int32)
        if not CONDITIONING:
            conditioned = conditioned * 0
        for begin in range(0, W, WORDS):
            inside = begin + words < W
            from_ptr = base_ptr + tail.to(tl.int64) * W
            if row >= 0:
                from_ptr = stored_ptr + row.to(tl.int64) * W
            value = tl.load(from_ptr + begin + words, mask=begin + words < W * conditioned, other=-1)
            tl.store(own_ptr + begin + words, value, mask=inside)
        tl.debug_barrier()
        if (conditioned != 0) & (row < 0):
            at = w.to(tl.int32)
            start = tl.load(rule_start_ptr + w)
            count = tl.load(rule_start_ptr + w + 1) - start
            for _ in range(depth + 1):
                for begin in range(0, count, RULES):
                    rule = begin + tl.arange(0, RULES)
                    there = rule < count
                    rule = start + rule
                    point = tl.load(point_ptr + rule, mask=there, other=0)
                    low = tl.load(low_ptr + rule, mask=there, other=0)
                    high = tl.load(high_ptr + rule, mask=there, other=0)
                    clear(
                        own_ptr, point, point + 1, there, tail, position_start_ptr, by_position_ptr, head_ptr,
                        joined_ptr, heads, TOKENS
                    )  # fmt: skip
                    clear(
                        own_ptr, low, high, there, tail, position_start_ptr, by_position_ptr, head_ptr, joined_ptr,
                        heads, TOKENS
                    )  # fmt: skip
                known = tl.maximum(at, 0)
                start = tl.load(tail_start_ptr + known)
                count = tl.where(at >= 0, tl.load(tail_count_ptr + known), 0)
                at = tl.where(at >= 0, tl.load(right_ptr + known), -1)
        tl.debug_barrier()
        token = tl.load(token_ptr + event).to(tl.int32)  # the text's own token can follow: it does
        word = tl.load(own_ptr + (token >> 5))
        bit = tl.full((), 1, dtype=tl.int32) << (token & 31)
        tl.store(own_ptr + (token >> 5), word | bit)


@triton.jit
def clear(
    own_ptr,
    low,
    high,
    there,
    tail,
    position_start_ptr,
    by_position_ptr,
    head_ptr,
    joined_ptr,
    heads,
    TOKENS: tl.constexpr,
):
    """Clear the bits of the tokens in intervals of capacity where the model decides; the order does not matter."""
    first = tl.load(position_start_ptr + low, mask=there, other=0)
    last = tl.load(position_start_ptr + high, mask=there, other=0)
    for begin in range(0, tl.max(last - first, axis=0), TOKENS):
        at = first[:, None] + begin + tl.arange(0, TOKENS)[None, :]
        inside = at < last[:, None]
        x = tl.load(by_position_ptr + at, mask=inside, other=0)
        head = tl.load(head_ptr + x, mask=inside, other=0)
        joined = tl.load(joined_ptr + tail * heads + head, mask=inside, other=0) != 0
        bit = tl.full((1, 1), 1, dtype=tl.int32) << (x & 31)
        tl.atomic_and(own_ptr + (x >> 5), ~bit, mask=inside & joined, sem="relaxed")
