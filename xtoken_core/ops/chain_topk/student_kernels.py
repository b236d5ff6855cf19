"""The Triton kernel that reads a student's row once: cross-entropy, whole and live sums."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.chain.start_kernels import (
    ADJACENT,
    FEW_LIVE,
    bits_of,
    columns_of,
    exp,
    live_log_sum,
    live_words,
    raised,
    row_of,
    row_sum,
    store_cross_entropy,
    sum_over_lanes,
)


@triton.jit
def log_of_live(base, bits, V, scale, highest, part, LANES: tl.constexpr):
    """Return `log sum exp` of live logits from their sum with the row's pivot; a small one is computed again."""
    lse = tl.log(part) + highest
    if part < FEW_LIVE:
        lse = live_log_sum(base, bits, V, scale, LANES)
    return lse


@triton.jit(do_not_specialize=["T_s"], do_not_specialize_on_alignment=["targets_ptr"])
def chain_listed_student_kernel(
    student_ptr,
    targets_ptr,
    event_ptr,
    bits_ptr,
    rest_bits_ptr,
    losses_ptr,
    hits_ptr,
    head_lse_ptr,
    top_ptr,
    total_ptr,
    s_lse_ptr,
    rest_lse_ptr,
    rest_some_ptr,
    T_s,
    V_head,
    V,
    W,
    stride_b,
    stride_t,
    scale,
    CROSS_ENTROPY: tl.constexpr,
    UNSCALED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Compute one student row: the sums over the tables' tokens, live ones and those of the rest."""
    row = tl.program_id(0)
    base = row_of(student_ptr, row, T_s, stride_b, stride_t)
    event = tl.load(event_ptr + row)
    compared = tl.where(event >= 0, V, 0)
    own = tl.maximum(event, 0).to(tl.int64) * W
    bits, rest_bits = bits_ptr + own, rest_bits_ptr + own
    top = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((LANES,), dtype=tl.float32)
    alive = tl.zeros((LANES,), dtype=tl.float32)
    rest = tl.zeros((LANES,), dtype=tl.float32)
    some = tl.zeros((LANES,), dtype=tl.int32)
    for begin in range(0, V, LANES * ADJACENT):
        x = columns_of(begin, LANES)
        z = tl.load(base + x, mask=x < V, other=float("-inf")).to(tl.float32) * scale
        live = bits_of(live_words(bits, begin, compared, LANES), x, compared)
        in_rest = bits_of(live_words(rest_bits, begin, compared, LANES), x, compared)
        # Online softmax: where a tile has a larger logit, the sums so far are rescaled to the new pivot.
        top, pivot, shrink = raised(top, z)
        e = exp(z - pivot[:, None])
        total = total * shrink + tl.sum(e, axis=1)
        alive = alive * shrink + tl.sum(tl.where(live, e, 0.0), axis=1)
        rest = rest * shrink + tl.sum(tl.where(in_rest, e, 0.0), axis=1)
        some = tl.maximum(some, tl.max(in_rest.to(tl.int32), axis=1))
    highest, whole = sum_over_lanes(top, total)
    tl.store(top_ptr + row, highest)
    tl.store(total_ptr + row, whole)
    if event >= 0:
        _, part = sum_over_lanes(top, alive)
        tl.store(s_lse_ptr + event, log_of_live(base, bits, V, scale, highest, part, LANES))
        _, part = sum_over_lanes(top, rest)
        tl.store(rest_lse_ptr + event, log_of_live(base, rest_bits, V, scale, highest, part, LANES))
        tl.store(rest_some_ptr + event, tl.max(some, axis=0))
    if CROSS_ENTROPY:
        target = tl.load(targets_ptr + row)
        # At temperature 1 the sums over the table's tokens begin the head's: only the columns behind are to be read.
        first = V
        if not UNSCALED:
            first = 0
            top = tl.full((LANES,), float("-inf"), dtype=tl.float32)
            total = tl.zeros((LANES,), dtype=tl.float32)
        top, total = row_sum(base, first, V_head, top, total, LANES)
        store_cross_entropy(base, row, target, top, total, losses_ptr, hits_ptr, head_lse_ptr, LANES)
