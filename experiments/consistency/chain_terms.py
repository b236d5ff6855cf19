"""Expected chain divergence: all comparisons of one student distribution taken together, so that a step is cheap.

Every term is `KL(P || Q)`, with `P` the teacher's constant distribution over some classes and `Q` the student's. The
sum of rate times KL over all events with the same `Q` is a constant minus `sum_c W_c log Q_c`, with `W` the sum of rate
times `P`. A step computes one row per distinct `Q`, not per event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.consistency.exact import Key, World
from xtoken_core.chain import ChainTables
from xtoken_core.ops.chain.divergences import xlogy
from xtoken_core.ops.chain.live import live_mask
from xtoken_core.ops.chain.reference import ChainOptions
from xtoken_core.ops.numerics import floored_log

BLOCK = 4096


@dataclass(frozen=True)
class Distributions:
    """Distributions over classes, derived from next-token distributions.

    Attributes:
        rows: `[U]` int64 state of each.
        masks: `[G, V]` bool sets of tokens.
        group: `[U]` int64, the set that each is conditioned on.
        extra: `[U]` int64, one more token of that set; -1 = none.
        classes: `[K, V]` int64 class of each token; `size` = in none.
        which: `[U]` int64, the row of `classes` that holds for each.
        size: Number of classes.
    """

    rows: Tensor
    masks: Tensor
    group: Tensor
    extra: Tensor
    classes: Tensor
    which: Tensor
    size: int

    def __call__(self, logits: Tensor) -> Tensor:
        """Return `[U, size]` probabilities of the classes.

        Args:
            logits: `[states, V]`.
        """
        rows = logits.index_select(0, self.rows)  # whose gradient is cheaper than that of indexing
        p = torch.softmax(rows.masked_fill(~self._allowed(), -torch.inf), dim=1)
        return p.new_zeros(len(p), self.size + 1).scatter_add(1, self.classes[self.which], p)[:, : self.size]

    def reached(self) -> Tensor:
        """Return `[U, size]` bool: the classes that some allowed token has."""
        found = torch.zeros(len(self.rows), self.size + 1)
        return found.scatter_add(1, self.classes[self.which], self._allowed().float())[:, : self.size] > 0

    def constant(self, logits: Tensor) -> Tensor:
        """Compute the result of a call without a gradient, block by block."""
        parts = (slice(at, at + BLOCK) for at in range(0, len(self.rows), BLOCK))
        per_row = ("rows", "group", "extra", "which")
        with torch.no_grad():
            return torch.cat(
                [replace(self, **{name: getattr(self, name)[part] for name in per_row})(logits) for part in parts]
            )

    def _allowed(self) -> Tensor:
        allowed = self.masks[self.group]
        more = torch.nonzero(self.extra >= 0).squeeze(1)
        allowed[more, self.extra[more]] = True
        return allowed


@dataclass(frozen=True)
class Members:
    """Distributions over classes, each conditioned on a few tokens.

    Attributes:
        rows: `[U]` int64 state of each.
        owner: `[n]` int64, the distribution that a token belongs to.
        token: `[n]` int64.
        cls: `[n]` int64 class of the token.
        size: Number of classes.
    """

    rows: Tensor
    owner: Tensor
    token: Tensor
    cls: Tensor
    size: int

    def __call__(self, logits: Tensor) -> Tensor:
        """Return `[U, size]` probabilities of the classes, from logits `[states, V]`."""
        chosen = logits.flatten().index_select(0, self.rows[self.owner] * logits.shape[1] + self.token)
        count = len(self.rows)
        most = chosen.detach().new_full((count,), -torch.inf).scatter_reduce(0, self.owner, chosen.detach(), "amax")
        weights = (chosen - most[self.owner]).exp()
        sums = weights.new_zeros(count * self.size).index_add(0, self.owner * self.size + self.cls, weights)
        sums = sums.view(count, self.size)
        return sums / sums.sum(1, keepdim=True)

    def reached(self) -> Tensor:
        """Return `[U, size]` bool: the classes that some token has."""
        found = torch.zeros(len(self.rows), self.size, dtype=torch.bool)
        found[self.owner, self.cls] = True
        return found

    def constant(self, logits: Tensor) -> Tensor:
        """Compute the result of a call without a gradient."""
        with torch.no_grad():
            return self(logits)


@dataclass(frozen=True)
class Term:
    """Expected divergence from constant targets: `constant - sum weight * log Q`."""

    student: Distributions | Members
    weight: Tensor
    constant: float

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the value, per unit of text.

        Args:
            logits: The student's, `[states, V_s]`.
        """
        return self.constant - (self.weight * floored_log(self.student(logits))).sum()

    @classmethod
    def of(cls, student: Distributions | Members, targets: Tensor, events: Iterable[tuple[int, int, float]]) -> Term:
        """Sum over events.

        Args:
            student: The student's distributions.
            targets: `[T, size]` the teacher's.
            events: Numbers of the student's and of the teacher's distribution, and the rate.
        """
        columns = list(zip(*events, strict=True))
        pairs, rates = torch.tensor(columns[:2]), torch.tensor(columns[2], dtype=torch.float64)
        reached = student.reached()
        rate = torch.sparse_coo_tensor(pairs, rates, (len(reached), len(targets)), check_invariants=True)
        weight = torch.where(reached, torch.sparse.mm(rate, targets), 0.0)
        # m KL(p / m || q) = sum p log p - m log m - sum p log q, with m the mass of p on the classes that are reached
        constant = torch.where(reached, torch.sparse.mm(rate, xlogy(targets)), 0.0).sum()
        distinct, number = np.unique(reached.numpy(), axis=0, return_inverse=True)
        masses = targets @ torch.from_numpy(distinct).double().T  # [T, distinct]
        mass = masses[pairs[1], torch.from_numpy(number.reshape(-1))[pairs[0]]]
        return cls(student, weight, float(constant - (rates * xlogy(mass)).sum()))


def chain_terms(
    world: World, teacher: Tensor, tables: ChainTables, options: ChainOptions, *, by_class: bool = True
) -> dict[Key, list[Term]]:
    """Return the terms of the chain divergence by class of chunk.

    Args:
        world: The source.
        teacher: Its logits, `[states, V_t]`.
        tables: The tables of its tokenizers.
        options: Which terms are included.
        by_class: Keep classes of chunks apart; else all chunks are of one, which is cheaper.
    """
    found: dict[Key, list[Term]] = defaultdict(list)
    if not by_class:
        world = _one_class(world)
    for key, term in _starts(world, teacher, tables, options):
        found[key].append(term)
    for holder in (0, 1):
        for key, term in _inner(world, teacher, tables, options, holder):
            found[key].append(term)
    return dict(found)


def _one_class(world: World) -> World:
    everything: Key = ("all", "")
    chunks: dict[Any, float] = defaultdict(float)
    starts: dict[Any, float] = defaultdict(float)
    for (_, *chunk), rate in world.chunks.items():
        chunks[everything, *chunk] += rate
    for (_, *start), rate in world.starts.items():
        starts[everything, *start] += rate
    return replace(world, chunks=chunks, starts=starts)


class _Numbers(dict[Hashable, int]):
    """Numbers of things in the order in which they are first met."""

    def __missing__(self, item: Hashable) -> int:
        self[item] = number = len(self)
        return number


def _starts(world: World, teacher: Tensor, tables: ChainTables, options: ChainOptions) -> list[tuple[Key, Term]]:
    sizes = [side.truth.shape[1] for side in world.sides]
    sides, masks, groups = (tables.student, tables.teacher), [], []
    for k in (0, 1):
        mask = torch.ones(1, sizes[k], dtype=torch.bool)
        group = np.zeros(sizes[1 - k], np.int64)
        if options.conditioning:
            live = live_mask(sides[k].live, torch.arange(sizes[1 - k]))
            distinct, group = np.unique(live.numpy(), axis=0, return_inverse=True)
            mask = torch.from_numpy(distinct)
        masks.append(mask)
        groups.append(group.reshape(-1).tolist())
    events: dict[Key, dict[tuple[int, int], float]] = defaultdict(lambda: defaultdict(float))
    names: dict[Key, tuple[_Numbers, _Numbers]] = defaultdict(lambda: (_Numbers(), _Numbers()))
    is_live = [mask.tolist() for mask in masks]
    for (key, rows, first, before), rate in world.starts.items():
        numbers = []
        for k in (0, 1):
            group = groups[k][before[1 - k]]
            # The text's own token can follow, whatever the table says: it does.
            extra = -1 if is_live[k][group][first[k]] else first[k]
            numbers.append(names[key][k][rows[k], group, extra])
        events[key][numbers[0], numbers[1]] += rate
    terms = []
    for key, rates in events.items():
        own, other = (
            _conditioned(names[key][k], masks[k], sides[k].root.long(), tables.classes + 1) for k in (0, 1)
        )  # fmt: skip
        listed = [(u, t, rate) for (u, t), rate in rates.items()]
        terms.append((key, Term.of(own, other.constant(teacher), listed)))
    return terms


def _conditioned(names: _Numbers, masks: Tensor, root: Tensor, size: int) -> Distributions:
    """Return the distributions by root of (state, number of its live set, another live token or -1)."""
    rows, group, extra = (torch.tensor(column) for column in zip(*names, strict=True))
    return Distributions(rows, masks, group, extra, root.unsqueeze(0), torch.zeros_like(rows), size)


def _inner(
    world: World, teacher: Tensor, tables: ChainTables, options: ChainOptions, holder: int
) -> list[tuple[Key, Term]]:  # fmt: skip
    """Return the terms at nodes inside one side's tokens."""
    side, other = (tables.student, tables.teacher) if holder == 0 else (tables.teacher, tables.student)
    start, piece, node = (x.tolist() for x in (side.spelling_start, side.piece, side.node))
    bare, slots = side.bare_space.tolist(), side.slot_start.diff().tolist()
    events: dict[Key, dict[tuple[int, int], float]] = defaultdict(lambda: defaultdict(float))
    names: dict[Key, tuple[_Numbers, _Numbers]] = defaultdict(lambda: (_Numbers(), _Numbers()))
    for (key, rows, tokens), rate in world.chunks.items():
        if len(tokens[holder]) != 1:
            continue
        token, others = tokens[holder][0], tokens[1 - holder]
        for n, expected in enumerate(others):
            at = start[token] + n
            if at >= start[token + 1] or piece[at] != expected:
                break
            last = n + 1 == len(others)
            if (last and not options.end_terms) or node[at] < 0:
                continue
            if (bare[node[at]] and not options.bare_space) or (holder == 0 and slots[node[at]] < 2):
                continue
            held, fresh = (rows[holder][0], node[at]), (rows[1 - holder][n + 1], node[at])
            numbers = names[key][0][held], names[key][1][fresh]
            events[key][numbers if holder == 0 else numbers[::-1]] += rate
    size, found = max(slots, default=0), []
    fresh_classes = _fresh_classes(side, other, size)
    for key, rates in events.items():
        held, fresh = _held(names[key][0], side, size), _fresh(names[key][1], fresh_classes, size)
        student, target = (held, fresh) if holder == 0 else (fresh, held)
        listed = [(u, t, rate) for (u, t), rate in rates.items()]
        found.append((key, Term.of(student, target.constant(teacher), listed)))
    return found


def _held(names: _Numbers, side: Any, size: int) -> Members:
    """Return the distributions over slots of (state, node)."""
    rows, nodes = (torch.tensor(column) for column in zip(*names, strict=True))
    start = side.member_start.long()
    counts = start[nodes + 1] - start[nodes]
    owner = torch.repeat_interleave(torch.arange(len(nodes)), counts)
    at = start[nodes][owner] + torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    slot = side.member_slot[at].long() - side.slot_start[nodes].long()[owner]
    return Members(rows, owner, side.member[at].long(), slot, size)


def _fresh_classes(side: Any, other: Any, size: int) -> Tensor:
    """Return `[nodes, V]` slots of the other side's tokens; `size` = none."""
    found = torch.full((len(side.bare_space), len(other.root)), size)
    for n in range(len(found)):
        first, last = int(side.slot_start[n]), int(side.slot_start[n + 1])
        for slot, cls in enumerate(side.slot_class[first:last].tolist()):
            if cls < 0:  # "ends here": every token that no other slot names
                found[n][found[n] == size] = slot
            else:
                found[n, other.root == cls] = slot
    return found


def _fresh(names: _Numbers, classes: Tensor, size: int) -> Distributions:
    rows, nodes = (torch.tensor(column) for column in zip(*names, strict=True))
    everything, none = torch.ones(1, classes.shape[1], dtype=torch.bool), torch.zeros_like(rows)
    return Distributions(rows, everything, none, none - 1, classes, nodes, size)
