"""Static tables of the chain kernels, derived once from the chain tables of a pair of tokenizers.

A class is *plain* if it has one token on each side: it is compared element by element. All others are numbered from 0
to `M - 1`; their members are listed in segments of at most `SEGMENT` tokens. Segments of more than `NARROW` are rows of
a table; the others lie in slices of `SLICE`, by size, so that neighbouring lanes read neighbouring entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from xtoken_core.chain.tables import ChainTables, LiveTable, SideTable
from xtoken_core.chain.word_splits import BROKEN, JOINED, KEPT

SEGMENT, NARROW = 128, 8
"""Most members of a segment of a class; and of a narrow one, of which a lane of a kernel takes one each."""
WIDE_ROWS = 16
"""Wide segments that are read at once."""
NODE_SEGMENT = 32
"""Most tokens of a segment of a node's slot."""
SLICE = 2048
"""Narrow segments of a slice."""
HEAVY, MOST_HEAVY = 400, 1024
"""A preceding token whose intervals take more steps than this has its live set stored whole; and how many may."""


@dataclass(frozen=True)
class Segments:
    """The members of classes that are not plain, on one side. Segments are numbered: wide ones, then slice by slice.

    Attributes:
        wide: `[rows, SEGMENT]` int32 tokens of wide segments, -1 = none.
        member: `[n]` int32 tokens, slice by slice, a slice's entries as `[height, SLICE]`; -1 = none.
        offset: `[slices]` int32, where a slice begins.
        height: `[slices]` int32.
        start: `[M]` int32, where a class's entries in `index` begin.
        count: `[M]` int32, its number of segments.
        index: `[segments]` int32, numbers of segments by class.
        token_start: `[M + 1]` int32, where a class's tokens begin.
        token: `[n]` int32 tokens by class.
        rows: Number of wide segments, rounded up to a multiple of `WIDE_ROWS`.
        slices: Number of slices.
    """

    wide: Tensor
    member: Tensor
    offset: Tensor
    height: Tensor
    start: Tensor
    count: Tensor
    index: Tensor
    token_start: Tensor
    token: Tensor
    rows: int
    slices: int

    @property
    def capacity(self) -> int:
        """Number of segments, those that fill the last row and slice included."""
        return self.rows + self.slices * SLICE


@dataclass(frozen=True)
class Nodes:
    """One side's nodes: tokens by slot.

    Attributes:
        slot_start: `[N + 1]` int32, where a node's slots begin.
        slot_class: `[S]` int32, -1 = "ends here".
        segment_start: `[S + 1]` int32, where a slot's segments begin.
        member_start: `[segments + 1]` int32, where a segment's tokens begin.
        member: `[m]` int32 tokens, by node and slot.
        member_slot: `[m]` int32 slot of each.
        most_segments: The most segments that a node has.
        most_slots: The most slots that a node has.
    """

    slot_start: Tensor
    slot_class: Tensor
    segment_start: Tensor
    member_start: Tensor
    member: Tensor
    member_slot: Tensor
    most_segments: int
    most_slots: int


@dataclass(frozen=True)
class Live:
    """Live sets of one side's tokens as words of 32 bits.

    Attributes:
        base: `[tails, W]` int32, what follows from the split into words alone.
        heavy: `[V_w]` int32 row of `stored` of a preceding token; -1 = none.
        stored: `[rows, W]` int32 whole live sets.
        position_start: `[width + 1]` int32, where the tokens of a position begin.
        by_position: `[V_x]` int32 tokens by the position of their first piece.
        joined: `[tails, heads]` uint8, 1 where the model decides.
        heads: Number of groups by beginning.
        words: `W`.
        table: The sets' rules.
    """

    base: Tensor
    heavy: Tensor
    stored: Tensor
    position_start: Tensor
    by_position: Tensor
    joined: Tensor
    heads: int
    words: int
    table: LiveTable


@dataclass(frozen=True)
class SideLayout:
    """One side.

    Attributes:
        root: `[V]` int32 class of each token.
        lookup: `[C + 1]` int32, the token of a plain class; `-1 - m` of another.
        segments: The members of other classes.
        nodes: Its nodes.
        live: Its live sets.
    """

    root: Tensor
    lookup: Tensor
    segments: Segments
    nodes: Nodes
    live: Live


@dataclass(frozen=True)
class ChainLayout:
    """Both sides.

    Attributes:
        student: The student's.
        teacher: The teacher's.
        partner: `[V_s]` int32, the teacher's token of a plain class; `-1 - m` in another.
        others: `M`, how many classes are not plain.
        classes: `C`.
    """

    student: SideLayout
    teacher: SideLayout
    partner: Tensor
    others: int
    classes: int


def chain_layout(tables: ChainTables) -> ChainLayout:
    """Return the layout of a pair's tables, on their device; it is built once per tables and kept with them."""
    kept: ChainLayout | None = tables.__dict__.get("_layout")
    if kept is None:
        kept = _build(tables)
        object.__setattr__(tables, "_layout", kept)
    return kept


def _build(tables: ChainTables) -> ChainLayout:
    device = tables.student.root.device
    sides = tables.student, tables.teacher
    C = tables.classes
    roots = [side.root.cpu().numpy().astype(np.int64) for side in sides]
    counts = [np.bincount(root, minlength=C + 1) for root in roots]
    plain = (counts[0] == 1) & (counts[1] == 1)
    plain[C] = False
    largest = np.maximum(counts[0], counts[1])
    others = np.flatnonzero(~plain)
    segments = (largest[others] + SEGMENT - 1) // SEGMENT
    others = others[np.argsort(-segments, kind="stable")]
    number = np.full(C + 1, -1)
    number[others] = np.arange(len(others))
    lookups, layouts = [], []
    for root in roots:
        lookup = -1 - number
        lookup[root[plain[root]]] = np.flatnonzero(plain[root])
        lookups.append(lookup)
    for k, side in enumerate(sides):
        layouts.append(
            SideLayout(
                root=_int32(roots[k], device),
                lookup=_int32(lookups[k], device),
                segments=_segments(roots[k], number, len(others), device),
                nodes=_nodes(side, device),
                live=_live(side.live, len(roots[k]), device),
            )
        )
    return ChainLayout(layouts[0], layouts[1], _int32(lookups[1][roots[0]], device), len(others), C)


def _segments(root: np.ndarray, number: np.ndarray, M: int, device: torch.device) -> Segments:
    own = number[root]
    tokens = np.flatnonzero(own >= 0)
    tokens = tokens[np.argsort(own[tokens], kind="stable")]
    size = np.bincount(own[tokens], minlength=M)
    begin = np.concatenate([[0], np.cumsum(size)])[:-1]
    count = np.maximum(-(-size // SEGMENT), 1)
    start = np.concatenate([[0], np.cumsum(count)])[:-1]
    owner = np.repeat(np.arange(M), count)
    rank = np.arange(len(owner)) - start[owner]
    length = np.clip(size[owner] - rank * SEGMENT, 0, SEGMENT)
    first = begin[owner] + rank * SEGMENT
    # Long segments first; among equals in the order of their first tokens, which is nearly that of the classes.
    key = np.where(length > 0, tokens[np.minimum(first, max(len(tokens) - 1, 0))] if len(tokens) else 0, 0)
    order = np.lexsort((key, -length))
    wide = order[length[order] > NARROW]
    rows = -(-len(wide) // WIDE_ROWS) * WIDE_ROWS
    table = np.full((max(rows, 1), SEGMENT), -1)
    for row, segment in enumerate(wide.tolist()):
        table[row, : length[segment]] = tokens[first[segment] : first[segment] + length[segment]]
    order = order[len(wide) :]
    numbered = np.empty(len(length), np.int64)
    numbered[wide], numbered[order] = np.arange(len(wide)), rows + np.arange(len(order))
    slices = -(-len(order) // SLICE)
    height = np.array([length[order[k * SLICE]] for k in range(slices)], dtype=np.int64)
    offset = np.concatenate([[0], np.cumsum(height * SLICE)])
    member = np.full(max(int(offset[-1]), 1), -1)
    for k in range(slices):
        chosen = order[k * SLICE : (k + 1) * SLICE]
        for j in range(int(height[k])):
            there = chosen[length[chosen] > j]
            lanes = np.arange(len(there))  # sorted by length, so those that are long enough come first
            member[offset[k] + j * SLICE + lanes] = tokens[first[there] + j]
    arrays = (table, member, offset[:-1], height, start, count, numbered, np.append(begin, len(tokens)), tokens)
    t, m, o, h, s, c, i, b, own_tokens = (_int32(each, device) for each in arrays)
    return Segments(t, m, o, h, s, c, i, b, own_tokens, rows=rows, slices=slices)


def _nodes(side: SideTable, device: torch.device) -> Nodes:
    N = len(side.bare_space)
    slot_start = side.slot_start.cpu().numpy().astype(np.int64)
    slot = side.member_slot.cpu().numpy().astype(np.int64)
    order = np.argsort(slot, kind="stable")
    member, slot = side.member.cpu().numpy()[order], slot[order]
    S = len(side.slot_class)
    size = np.bincount(slot, minlength=S)
    begin = np.concatenate([[0], np.cumsum(size)])
    count = -(-size // NODE_SEGMENT)
    segment_start = np.concatenate([[0], np.cumsum(count)])
    owner = np.repeat(np.arange(S), count)
    rank = np.arange(len(owner)) - segment_start[owner]
    member_start = np.append(begin[:-1][owner] + rank * NODE_SEGMENT, len(member))
    per_node = segment_start[slot_start[1:]] - segment_start[slot_start[:-1]] if N else np.zeros(1, np.int64)
    return Nodes(
        slot_start=_int32(slot_start, device),
        slot_class=_int32(side.slot_class.cpu().numpy(), device),
        segment_start=_int32(segment_start, device),
        member_start=_int32(member_start, device),
        member=_int32(member, device),
        member_slot=_int32(slot, device),
        most_segments=int(per_node.max()),
        most_slots=int(np.diff(slot_start).max()) if N else 1,
    )


def _live(live: LiveTable, V: int, device: torch.device) -> Live:
    head, state = live.head.cpu().numpy(), live.state.cpu().numpy()
    position = live.position.cpu().numpy().astype(np.int64)
    position_start = np.concatenate([[0], np.cumsum(np.bincount(position, minlength=live.width))])
    by_position = np.argsort(position, kind="stable")
    slices = _rules(live)
    rows, heavy = _heavy(live, position_start, slices)
    stored = [_words(_whole_set(live, state, head, position, int(w), slices)) for w in rows]
    W = -(-V // 32)
    return Live(
        base=_int32(np.stack([_words((row != BROKEN)[head]) for row in state]), device),
        heavy=_int32(heavy, device),
        stored=_int32(np.stack(stored) if stored else np.zeros((1, W), np.int32), device),
        position_start=_int32(position_start, device),
        by_position=_int32(by_position, device),
        joined=torch.from_numpy((state == JOINED).astype(np.uint8)).to(device),
        heads=state.shape[1],
        words=W,
        table=live,
    )


def _rules(live: LiveTable) -> tuple[np.ndarray, np.ndarray]:
    """Return where the slices of rules of each token begin, and how many rules they have, `[V_w, D]`."""
    arrays = (live.rule_start, live.tail_start, live.tail_count, live.right)
    rule_start, tail_start, tail_count, right = (each.cpu().numpy().astype(np.int64) for each in arrays)
    at = np.arange(len(right))
    starts, counts = [rule_start[:-1]], [np.diff(rule_start)]
    for _ in range(live.depth):
        known = np.maximum(at, 0)
        starts.append(tail_start[known])
        counts.append(np.where(at >= 0, tail_count[known], 0))
        at = np.where(at >= 0, right[known], -1)
    return np.stack(starts, 1), np.stack(counts, 1)


def _heavy(
    live: LiveTable, position_start: np.ndarray, slices: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens with many or long intervals, the worst first, and each token's row among them."""
    low, high = (each.cpu().numpy().astype(np.int64) for each in (live.low, live.high))
    steps = np.concatenate([[0], np.cumsum((position_start[high] - position_start[low]) / 512 + 1 / 16)])
    starts, counts = slices
    cost = (steps[starts + counts] - steps[starts]).sum(1)
    rows = np.argsort(-cost, kind="stable")[:MOST_HEAVY]
    rows = rows[cost[rows] > HEAVY]
    heavy = np.full(len(cost), -1)
    heavy[rows] = np.arange(len(rows))
    return rows, heavy


def _whole_set(
    live: LiveTable,
    state: np.ndarray,
    head: np.ndarray,
    position: np.ndarray,
    w: int,
    slices: tuple[np.ndarray, np.ndarray],
) -> np.ndarray:
    starts, counts = (each[w] for each in slices)
    point, low, high = (each.cpu().numpy() for each in (live.point, live.low, live.high))
    change = np.zeros(live.width + 2, np.int64)
    for begin, count in zip(starts.tolist(), counts.tolist(), strict=True):
        chosen = slice(begin, begin + count)
        np.add.at(change, point[chosen], 1)
        np.add.at(change, point[chosen] + 1, -1)
        np.add.at(change, low[chosen], 1)
        np.add.at(change, high[chosen], -1)
    blocked = np.cumsum(change)[position] > 0
    of_pair = state[int(live.tail[w]), head]
    alive: np.ndarray = (of_pair == KEPT) | ((of_pair == JOINED) & ~blocked)
    return alive


def _words(bits: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-len(bits) // 32) * 32, bool)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)


def _int32(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values.astype(np.int32))).to(device)
