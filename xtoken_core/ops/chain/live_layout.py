"""Live sets of one side's tokens as words of 32 bits, and what the kernels need to clear a token's bits.

A token has a bit in the order of its side's ids. The kernels that compare classes read others, in their own order: a
token that is a member of a class that is not plain has one in the order of the members, and the teacher's token of a
plain class one in the order of the student's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from xtoken_core.chain.tables import BROKEN, JOINED, KEPT, LiveTable

HEAVY, MOST_HEAVY = 400, 1024
"""A preceding token whose intervals take more steps than this has its live set stored whole; and how many may."""


@dataclass(frozen=True)
class Live:
    """Live sets of one side. A row of words has three regions: own order, plain classes, members.

    Attributes:
        base: `[tails + 1, W]` int32, what follows from the split into words alone; the last row has every token.
        heavy: `[V_w]` int32 row of `stored` of a preceding token; -1 = none.
        stored: `[rows, W]` int32 whole live sets.
        position_start: `[width + 1]` int32, where the tokens of a position begin.
        by_position: `[n]` int32 tokens by the position of their first piece, and of that of their shorter beginnings.
        second_by_position: `[n]` int32, their second bits, counted from the second region; -1 = none.
        head_by_position: `[n]` int32, their columns of `joined`.
        second: `[V_x]` int32, likewise by token.
        joined: `[tails, heads]` uint8, 1 where the model decides by the first piece of the tokens with this group by
            beginning; for each k > 0 as many columns again, where it decides by that of their k-th shorter beginning.
        heads: Columns of `joined`.
        words: Words of each region; their sum is `W`.
        table: The sets' rules.
    """

    base: Tensor
    heavy: Tensor
    stored: Tensor
    position_start: Tensor
    by_position: Tensor
    second_by_position: Tensor
    head_by_position: Tensor
    second: Tensor
    joined: Tensor
    heads: int
    words: tuple[int, int, int]
    table: LiveTable

    @property
    def positions(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tokens by position, in the order of the kernels' arguments."""
        return self.position_start, self.by_position, self.second_by_position, self.head_by_position

    @property
    def rules(self) -> tuple[Tensor, ...]:
        """The rules of all preceding tokens, likewise."""
        table = self.table
        chain = table.tail_start, table.tail_count, table.right
        return table.point, table.low, table.high, table.rule_start, *chain


def live_layout(live: LiveTable, plain: np.ndarray, members: np.ndarray, columns: int, device: torch.device) -> Live:
    """Return the live sets of one side.

    Args:
        live: The sets.
        plain: `[V_x]`, the bit of a token in the region of plain classes; -1 = none.
        members: `[n]`, the tokens of classes that are not plain, in the order of their bits; -1 = none.
        columns: Bits of the region of plain classes.
        device: Device of the result.
    """
    V = len(plain)
    head, state = live.head.cpu().numpy(), live.state.cpu().numpy()
    position = live.position.cpu().numpy().astype(np.int64)
    joined = np.concatenate([state == JOINED + k for k in range(len(position))], axis=1)
    columns_of = head + state.shape[1] * np.arange(len(position))[:, None]  # [K, V_x]
    which, tokens = np.nonzero(joined.any(axis=0)[columns_of])
    at = position[which, tokens]
    position_start = np.concatenate([[0], np.cumsum(np.bincount(at, minlength=live.width))])
    order = np.argsort(at, kind="stable")
    by_position = tokens[order]
    slices = _rules(live)
    rows, heavy = _heavy(live, position_start, slices)
    words = _words_of(V), _words_of(columns), _words_of(len(members))
    # Regions in bits: own ids, then 32 * words[1] of plain classes, then members; `second` counts from the second on.
    second = plain.copy()
    second[members[members >= 0]] = 32 * words[1] + np.flatnonzero(members >= 0)
    source = np.full(32 * sum(words), V)  # the bit behind a set is never set
    source[:V] = np.arange(V)
    known = np.flatnonzero(second >= 0)
    source[32 * words[0] + second[known]] = known
    sets = [(row != BROKEN)[head] for row in state] + [np.ones(V, bool)]
    stored = [_packed(_whole_set(live, state, head, position, int(w), slices), source) for w in rows]
    return Live(
        base=as_int32(np.stack([_packed(alive, source) for alive in sets]), device),
        heavy=as_int32(heavy, device),
        stored=as_int32(np.stack(stored) if stored else np.zeros((1, sum(words)), np.int32), device),
        position_start=as_int32(position_start, device),
        by_position=as_int32(by_position, device),
        second_by_position=as_int32(second[by_position], device),
        head_by_position=as_int32(columns_of[which, tokens][order], device),
        second=as_int32(second, device),
        joined=torch.from_numpy(joined.astype(np.uint8)).to(device),
        heads=joined.shape[1],
        words=words,
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
    # What a rule costs a program of `chain_clear_kernel`: its tokens by 512, and a sixteenth for reading it.
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
    # As in `live.live_mask`: a difference array over positions.
    change = np.zeros(live.width + 2, np.int64)
    for begin, count in zip(starts.tolist(), counts.tolist(), strict=True):
        chosen = slice(begin, begin + count)
        np.add.at(change, point[chosen], 1)
        np.add.at(change, point[chosen] + 1, -1)
        np.add.at(change, low[chosen], 1)
        np.add.at(change, high[chosen], -1)
    blocked = np.cumsum(change)[position] > 0
    of_pair = state[int(live.tail[w]), head]
    joined = of_pair == JOINED + np.arange(len(blocked))[:, None]  # [K, V_x]
    alive: np.ndarray = (of_pair == KEPT) | (joined & ~blocked).any(axis=0)
    return alive


def _words_of(bits: int) -> int:
    return -(-bits // 32)


def _packed(alive: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Return a set's words: bit i is that of the token `source[i]`."""
    bits = np.append(alive, False)[source]
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)


def as_int32(values: np.ndarray, device: torch.device) -> Tensor:
    """Return an array as an int32 tensor."""
    return torch.from_numpy(np.ascontiguousarray(values.astype(np.int32))).to(device)
