"""The Triton kernels of `largest_logits`.

The first reads every row once and keeps maximum and sum of each group of adjacent tokens. The others work on one row a
program: on the groups, on the tokens of the chosen ones, and on the selected tokens. Logits are compared as keys,
integers in the order of the floats, of which narrow dtypes need the first bits alone.
"""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.row_kernels import ordered_bits

SIZE = tl.constexpr(64)
"""Tokens of a group."""
NO_KEY = tl.constexpr(-0x80000000)
"""Before the key of every logit."""
LOWEST_KEY = tl.constexpr(-0x7F800001)
"""The key of -inf."""
NO_PICK = tl.constexpr(-0x8000000000000000)
LAST = tl.constexpr(0x7FFFFFFF)
INF = tl.constexpr(float("inf"))


@triton.jit
def row_base(logits_ptr, row, T, stride_b, stride_t):
    """Return where row number `row` begins: position `row % T` of sample `row // T`."""
    return logits_ptr + row // T * stride_b + row % T * stride_t


@triton.jit(do_not_specialize=["T"])
def group_statistics_kernel(
    logits_ptr,
    maxima_ptr,
    sums_ptr,
    scaled_ptr,
    T,
    V,
    width,
    groups,
    tiles,
    stride_b,
    stride_t,
    scale,
    CUT: tl.constexpr,
    SCALED: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Compute of GROUPS groups of one row the maximum, NaN left out, and `sum exp(x - maximum)`.

    The sum of a group with NaN is NaN. With SCALED also `sum exp((x - maximum) * scale)`. The first `width` columns can
    be read, which is a multiple of 16 where that is possible, and V of them are tokens: CUT if it is fewer.
    """
    tile = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64)
    group = tile * GROUPS + tl.arange(0, GROUPS)
    columns = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    base = row_base(logits_ptr, row, T, stride_b, stride_t)
    x = tl.load(base + columns, mask=columns < width, other=-INF).to(tl.float32)
    if CUT:
        x = tl.where(columns < V, x, -INF)
    top = tl.max(x, axis=1)
    # [GROUPS, SIZE]. An infinite maximum is no pivot: inf - inf would be NaN.
    away = x - tl.where(tl.abs(top) < INF, top, 0.0)[:, None]
    group_at = row * groups + group
    tl.store(maxima_ptr + group_at, top)
    tl.store(sums_ptr + group_at, tl.sum(tl.exp(away), axis=1))
    if SCALED:
        tl.store(scaled_ptr + group_at, tl.sum(tl.exp(away * scale), axis=1))


@triton.jit
def border(key, low, high, wanted):
    """Return the largest number up to `high` that at least `wanted` keys reach, as so many reach `low`."""
    low, high = low.to(tl.int64), high.to(tl.int64)  # their sum may not fit 32 bits
    # Bisection on keys: at most as many turns as a key has bits, SHIFT fewer for narrow dtypes.
    while low < high:
        middle = (low + high + 1) >> 1
        enough = tl.sum((key >= middle.to(tl.int32)).to(tl.int32)) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def sum_of_groups(top, total, counted, scale):
    """Return the largest finite maximum of some groups and the sum of `exp(x * scale)` relative to it, or to 0."""
    finite = tl.abs(top) < INF
    largest = tl.max(tl.where(counted & finite, top, -INF))
    pivot = tl.where(largest == -INF, 0.0, largest)
    # A group with an infinite maximum has its sum relative to 0.
    part = tl.where(finite, total * tl.exp((top - pivot) * scale), total)
    return largest, tl.sum(tl.where(counted, part, 0.0))


@triton.jit
def logarithm(top, total, scale):
    """Return the logarithm of a sum that is relative to `top`, or to 0 if that is -inf."""
    return tl.log(total) + tl.where(top == -INF, 0.0, top) * scale


@triton.jit
def with_tokens(top, total, x, counted, scale):
    """Return `top` and `total` of `sum_of_groups` with some logits more."""
    finite = counted & (tl.abs(x) < INF)
    largest = tl.maximum(top, tl.max(tl.where(finite, x, -INF)))
    pivot = tl.where(largest == -INF, 0.0, largest)
    before = tl.where(top == -INF, total, total * tl.exp((top - pivot) * scale))
    return largest, before + tl.sum(tl.where(counted, tl.exp((x - pivot) * scale), 0.0))


@triton.jit
def with_equal_tokens(top, total, x, count, scale):
    """Return `top` and `total` of `sum_of_groups` with `count` times a logit more."""
    largest = tl.where((count > 0) & (tl.abs(x) < INF), tl.maximum(top, x), top)
    pivot = tl.where(largest == -INF, 0.0, largest)
    before = tl.where(top == -INF, total, total * tl.exp((top - pivot) * scale))
    return largest, before + tl.where(count > 0, count * tl.exp((x - pivot) * scale), 0.0)


@triton.jit(do_not_specialize=["T", "k", "wanted"])
def choose_groups_kernel(
    logits_ptr,
    targets_ptr,
    maxima_ptr,
    sums_ptr,
    scaled_ptr,
    chosen_ptr,
    edge_ptr,
    log_z_ptr,
    log_z_scaled_ptr,
    own_ptr,
    top_ptr,
    total_ptr,
    T,
    V,
    k,
    wanted,
    groups,
    stride_b,
    stride_t,
    scale,
    SCALED: tl.constexpr,
    K: tl.constexpr,
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Compute one row's normalisers and its own token's log-probability; store its `wanted` best groups, ascending.

    Those are the groups with the largest maxima, of equal ones the first. Stored are also a key that k of the row's
    tokens reach, and the sum over all other groups.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, LANES)
    inside = group * SIZE < V
    top = tl.load(maxima_ptr + row * groups + group, mask=inside, other=-INF)
    total = tl.load(sums_ptr + row * groups + group, mask=inside, other=0.0)
    log_z = logarithm(*sum_of_groups(top, total, inside, 1.0), 1.0)
    tl.store(log_z_ptr + row, log_z)
    target = tl.minimum(tl.maximum(tl.load(targets_ptr + row), 0), V - 1)
    own = tl.load(row_base(logits_ptr, row, T, stride_b, stride_t) + target).to(tl.float32)
    tl.store(own_ptr + row, own - log_z)

    # The sum of a group with NaN is NaN, whose key is above all others: such a group is chosen.
    key = ordered_bits(tl.where(total != total, total, top)) >> SHIFT
    key = tl.where(inside, key, NO_KEY)
    edge = border(key, tl.min(tl.where(inside, key, LAST)), tl.max(key), wanted)
    above, equal = key > edge, key == edge
    # Two counts in one scan: groups above the edge in the low 16 bits, groups at it in the high ones. A row has at most
    # 16,384 groups (MOST_GROUPS), so that none overflows. All groups above are chosen, and the first ones at the edge.
    counted = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
    room = wanted - tl.sum(above.to(tl.int32))
    chosen = above | (equal & ((counted >> 16) <= room))
    to = (counted & 0xFFFF) + tl.minimum(counted >> 16, room) - 1
    tl.store(chosen_ptr + row * K + to, group, mask=chosen)
    tl.store(edge_ptr + row, tl.where(wanted < k, LOWEST_KEY >> SHIFT, edge))
    if SCALED:
        total = tl.load(scaled_ptr + row * groups + group, mask=inside, other=0.0)
        tl.store(log_z_scaled_ptr + row, logarithm(*sum_of_groups(top, total, inside, scale), scale))
    rest_top, rest_total = sum_of_groups(top, total, inside & (chosen == 0), scale)
    tl.store(top_ptr + row, rest_top)
    tl.store(total_ptr + row, rest_total)


@triton.jit
def group_tokens(chosen_ptr, base, slot, V, width, wanted, SHIFT: tl.constexpr):
    """Return columns, logits and keys of the groups in some slots of a row; tokens that do not exist have NO_KEY."""
    group = tl.load(chosen_ptr + slot, mask=slot < wanted, other=0)
    columns = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    filled = (slot < wanted)[:, None]
    x = tl.load(base + columns, mask=filled & (columns < width), other=-INF).to(tl.float32)
    return columns, x, tl.where(filled & (columns < V), ordered_bits(x) >> SHIFT, NO_KEY)


@triton.jit
def store_tokens(
    chosen_ptr,
    picked_ptr,
    base,
    edge,
    room,
    V,
    width,
    wanted,
    K: tl.constexpr,
    SHIFT: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Store a row's tokens above the edge and the first `room` at it, in the order of their ids."""
    before = 0  # tokens above the edge, fewer than k <= 512, and from bit 10 on those at it
    for start in range(0, K, SLOTS):
        columns, x, key = group_tokens(chosen_ptr, base, start + tl.arange(0, SLOTS), V, width, wanted, SHIFT)
        above, equal = key > edge, key == edge
        one = above.to(tl.int32) + (equal.to(tl.int32) << 10)
        of_group = tl.sum(one, axis=1)
        # Rank of a token among those chosen: within its group, plus the groups before it, plus the slots before these.
        counted = before + tl.cumsum(one, axis=1) + (tl.cumsum(of_group, axis=0) - of_group)[:, None]
        to = (counted & 0x3FF) + tl.minimum(counted >> 10, room) - 1
        pick = (ordered_bits(x).to(tl.int64) << 32) | (columns ^ LAST).to(tl.int64)
        tl.store(picked_ptr + to, pick, mask=above | (equal & ((counted >> 10) <= room)))
        before += tl.sum(of_group)


@triton.jit(do_not_specialize=["T", "k", "wanted"])
def select_tokens_kernel(
    logits_ptr,
    chosen_ptr,
    edge_ptr,
    picked_ptr,
    top_ptr,
    total_ptr,
    T,
    V,
    width,
    k,
    wanted,
    stride_b,
    stride_t,
    scale,
    K: tl.constexpr,
    SHIFT: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Select the k largest logits of one row's chosen groups, of equal ones the lowest ids; add the others to the rest.

    They are stored in the order of their ids, as `key << 32 | LAST ^ id`, from SLOTS groups at a time, which are read
    again: what ranks them would not fit into registers for all groups.
    """
    row = tl.program_id(0).to(tl.int64)
    base = row_base(logits_ptr, row, T, stride_b, stride_t)
    _, x, key = group_tokens(chosen_ptr + row * K, base, tl.arange(0, K), V, width, wanted, SHIFT)
    edge = border(key, tl.load(edge_ptr + row), tl.max(key), k)
    room = k - tl.sum((key > edge).to(tl.int32))
    # Of tokens equal to the edge `room` are listed; the others belong to the rest.
    beyond = tl.sum((key == edge).to(tl.int32)) - room
    of_edge = tl.max(tl.where(key == edge, x, -INF))
    counted = (key < edge) & (key > NO_KEY)
    top, total = tl.load(top_ptr + row), tl.load(total_ptr + row)
    top, total = with_tokens(top, total, x, counted, scale)
    top, total = with_equal_tokens(top, total, of_edge, beyond, scale)
    tl.store(top_ptr + row, top)
    tl.store(total_ptr + row, total)
    store_tokens(chosen_ptr + row * K, picked_ptr + row * K, base, edge, room, V, width, wanted, K, SHIFT, SLOTS)


@triton.jit(do_not_specialize=["k"])
def order_tokens_kernel(
    picked_ptr, log_z_scaled_ptr, top_ptr, total_ptr, ids_ptr, values_ptr, log_rest_ptr, k, scale, K: tl.constexpr
):
    """Store one row's selected tokens, largest first, and the logarithm of the mass of all others."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, K)
    picked = tl.load(picked_ptr + row * K + slot, mask=slot < k, other=NO_PICK)
    # Key first, then LAST ^ id: descending gives equal logits in ascending order of ids.
    picked = tl.sort(picked, descending=True)
    bits = (picked >> 32).to(tl.int32)
    value = tl.where(bits < 0, bits ^ LAST, bits).to(tl.float32, bitcast=True)
    ids = (picked & LAST) ^ LAST
    log_z = tl.load(log_z_scaled_ptr + row)
    top, total = tl.load(top_ptr + row), tl.load(total_ptr + row)
    tl.store(values_ptr + row * k + slot, value, mask=slot < k)
    tl.store(ids_ptr + row * k + slot, ids, mask=slot < k)
    tl.store(log_rest_ptr + row, logarithm(top, total, scale) - log_z)
