"""Live masks: which tokens can follow a token of the other side, for a block of rows at once."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from xtoken_core.chain.tables import BROKEN, JOINED, KEPT, LiveTable
from xtoken_core.ops.chain.ragged import ragged


def live_mask(live: LiveTable, before: Int[Tensor, " E"], most: int | None = None) -> Bool[Tensor, "E V_x"]:
    """Mark the tokens that can follow.

    Args:
        live: The sets.
        before: The other side's last tokens.
        most: Upper bound of the rules of all of them; None: that of the table.
    """
    state = live.state[live.tail[before].long()].index_select(1, live.head.long())  # [E, V_x]
    if not len(live.point):  # no two tokens can be joined
        return state != BROKEN
    starts, counts = _slices(live, before)  # [E, D]
    E, D = starts.shape
    rules = ragged(counts.flatten(), starts.flatten(), E * live.most_rules if most is None else most)
    rule, row = rules.source, rules.owner // D  # the padding is that of row E
    # A difference array over positions: +1 where an excluded interval begins, -1 behind it; its running sum is the
    # number of rules that exclude a position. A single point is an interval of one.
    change = torch.zeros(E + 1, live.width + 1, dtype=torch.int32, device=before.device)
    offsets, ones = row * (live.width + 1), torch.ones_like(row, dtype=torch.int32)
    for low, high in ((live.point[rule], live.point[rule] + 1), (live.low[rule], live.high[rule])):
        change.view(-1).scatter_add_(0, offsets + low, ones).scatter_add_(0, offsets + high, -ones)
    change = change[:E]
    blocked = change.cumsum(1, dtype=torch.int32) > 0  # [E, width + 1]
    can_follow = state == KEPT
    for k, position in enumerate(live.position.long()):
        can_follow |= (state == JOINED + k) & ~blocked.index_select(1, position)
    return can_follow


def live_among(
    live: LiveTable, before: Int[Tensor, " E"], tokens: Int[Tensor, "E k"], most: int
) -> Bool[Tensor, "E k"]:
    """Mark those of some tokens that can follow: `live_mask` without a row as wide as the vocabulary.

    Args:
        live: The sets.
        before: The other side's last tokens.
        tokens: Valid tokens of this side.
        most: Upper bound of the rules of all events.
    """
    state = live.state[live.tail[before].long().unsqueeze(1), live.head.long()[tokens]]
    if not len(live.point):
        return state != BROKEN
    starts, counts = _slices(live, before)
    rules = ragged(counts.flatten(), starts.flatten(), most)
    row, stride = rules.owner // starts.shape[1], live.width + 2
    position = live.position.long()[(state.long() - JOINED).clamp(min=0), tokens]  # [E, k]

    def passed(*ends: Tensor) -> Tensor:
        """Count the ends at or before each token, those of all rows before it included."""
        # The same by counting ends up to a token's position: no row as wide as the vocabulary.
        keys = torch.cat([row * stride + end[rules.source] for end in ends]).sort().values
        events = torch.arange(len(before), device=row.device).unsqueeze(1)
        return torch.searchsorted(keys, events * stride + position, right=True)

    blocked = passed(live.point, live.low) > passed(live.point + 1, live.high)
    return (state == KEPT) | ((state >= JOINED) & ~blocked)


def rule_counts(live: LiveTable, before: Int[Tensor, " E"]) -> Int[Tensor, " E"]:
    """Return the number of rules of each event."""
    return _slices(live, before)[1].sum(1)


def _slices(live: LiveTable, before: Int[Tensor, " E"]) -> tuple[Int[Tensor, "E D"], Int[Tensor, "E D"]]:
    """Return the slices of rules of each token: its own, then one per token of its right spine."""
    at = before
    starts = [live.rule_start[at]]
    counts = [live.rule_start[at + 1] - live.rule_start[at]]
    for _ in range(live.depth):
        there = at >= 0
        # -1 ends a spine: it has no more rules.
        known = at.clamp(min=0)
        starts.append(live.tail_start[known])
        counts.append(torch.where(there, live.tail_count[known], 0))
        at = torch.where(there, live.right[known].long(), -1)
    return torch.stack(starts, 1).long(), torch.stack(counts, 1).long()
