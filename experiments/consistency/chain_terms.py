"""Expected chain divergence: all comparisons of one student distribution taken together, so that a step is cheap.

Every term is `KL(P || Q)`, with `P` the teacher's constant distribution over some classes and `Q` the student's. The
sum of rate times KL over all events with the same `Q` is a constant minus `sum_c W_c log Q_c`, with `W` the sum of rate
times `P`. A step computes one row per distinct `Q`, not per event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.consistency.exact import Key, World
from xtoken_core.chain import ChainTables
from xtoken_core.losses.chain import ChainOptions, floored_log, xlogy
from xtoken_core.losses.chain_live import live_mask

BLOCK = 2048


@dataclass(frozen=True)
class Distributions:
    """Distributions over classes, derived from next-token distributions.

    Attributes:
        rows: `[U]` int64 state of each.
        allowed: `[U, V]` bool tokens that it is conditioned on.
        classes: `[U, V]` int64 class of each token; `size` = in none.
        size: Number of classes.
    """

    rows: Tensor
    allowed: Tensor
    classes: Tensor
    size: int

    def __call__(self, logits: Tensor) -> Tensor:
        """Return `[U, size]` probabilities of the classes.

        Args:
            logits: `[states, V]`.
        """
        p = torch.softmax(logits[self.rows].masked_fill(~self.allowed, -torch.inf), dim=1)
        return p.new_zeros(len(p), self.size + 1).scatter_add(1, self.classes, p)[:, : self.size]

    def reached(self) -> Tensor:
        """Return `[U, size]` bool: the classes that some allowed token has."""
        found = torch.zeros(len(self.rows), self.size + 1)
        return found.scatter_add(1, self.classes, self.allowed.float())[:, : self.size] > 0


@dataclass(frozen=True)
class Term:
    """Expected divergence from constant targets: `constant - sum weight * log Q`."""

    student: Distributions
    weight: Tensor
    constant: float

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the value, per unit of text.

        Args:
            logits: The student's, `[states, V_s]`.
        """
        return self.constant - (self.weight * floored_log(self.student(logits))).sum()

    @classmethod
    def of(cls, student: Distributions, targets: Tensor, events: Iterable[tuple[int, int, float]]) -> Term:
        """Sum over events.

        Args:
            student: The student's distributions.
            targets: `[T, size]` the teacher's.
            events: Numbers of the student's and of the teacher's distribution, and the rate.
        """
        columns = list(zip(*events, strict=True))
        own, other = torch.tensor(columns[0]), torch.tensor(columns[1])
        rates = torch.tensor(columns[2], dtype=torch.float64)
        reached, weight, constant = student.reached(), torch.zeros(len(student.rows), student.size).double(), 0.0
        for at in range(0, len(own), BLOCK):
            u, rate = own[at : at + BLOCK], rates[at : at + BLOCK]
            p = torch.where(reached[u], targets[other[at : at + BLOCK]], 0.0)
            # m KL(p / m || q) = sum p log p - m log m - sum p log q: the mass m is a constant
            constant += float((rate * (xlogy(p).sum(1) - xlogy(p.sum(1)))).sum())
            weight.index_add_(0, u, rate.unsqueeze(1) * p)
        return cls(student, weight, constant)


def chain_terms(
    world: World, teacher: Tensor, tables: ChainTables, options: ChainOptions
) -> dict[Key, list[Term]]:  # fmt: skip
    """Return the terms of the chain divergence by class of chunk.

    Args:
        world: The source.
        teacher: Its logits, `[states, V_t]`.
        tables: The tables of its tokenizers.
        options: Which terms are included.
    """
    found: dict[Key, list[Term]] = defaultdict(list)
    for key, term in _starts(world, teacher, tables, options):
        found[key].append(term)
    for holder in (0, 1):
        for key, term in _inner(world, teacher, tables, options, holder):
            found[key].append(term)
    return dict(found)


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
        terms.append((key, Term.of(own, other(teacher), listed)))
    return terms


def _conditioned(names: _Numbers, masks: Tensor, root: Tensor, size: int) -> Distributions:
    """Return the distributions by root of (state, number of its live set, another live token or -1)."""
    rows, group, extra = (torch.tensor(column) for column in zip(*names, strict=True))
    allowed = masks[group].clone()
    more = torch.nonzero(extra >= 0).squeeze(1)
    allowed[more, extra[more]] = True
    return Distributions(rows, allowed, root.expand(allowed.shape), size)


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
    held_classes, fresh_classes = _node_classes(side, other, size)
    for key, rates in events.items():
        held = _at_nodes(names[key][0], held_classes, size, conditioned=True)
        fresh = _at_nodes(names[key][1], fresh_classes, size, conditioned=False)
        student, target = (held, fresh) if holder == 0 else (fresh, held)
        found.append((key, Term.of(student, target(teacher), [(u, t, rate) for (u, t), rate in rates.items()])))
    return found


def _node_classes(side: Any, other: Any, size: int) -> tuple[Tensor, Tensor]:
    """Return `[nodes, V]` slots of the holder's tokens and of the other side's; `size` = none."""
    count = len(side.bare_space)
    held = torch.full((count, len(side.root)), size)
    fresh = torch.full((count, len(other.root)), size)
    for n in range(count):
        members = slice(int(side.member_start[n]), int(side.member_start[n + 1]))
        first, last = int(side.slot_start[n]), int(side.slot_start[n + 1])
        held[n, side.member[members].long()] = side.member_slot[members].long() - first
        for slot, cls in enumerate(side.slot_class[first:last].tolist()):
            if cls < 0:  # "ends here": every token that no other slot names
                fresh[n][fresh[n] == size] = slot
            else:
                fresh[n, other.root == cls] = slot
    return held, fresh


def _at_nodes(names: _Numbers, classes: Tensor, size: int, *, conditioned: bool) -> Distributions:
    rows, nodes = (torch.tensor(column) for column in zip(*names, strict=True))
    of_event = classes[nodes]
    allowed = of_event < size if conditioned else torch.ones_like(of_event, dtype=torch.bool)
    return Distributions(rows, allowed, of_event, size)
