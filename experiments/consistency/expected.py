"""Expected losses of a tabular student: every chunk of the source at its rate, the teacher exact."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.consistency.exact import Key, World
from xtoken_core.chain import ChainTables
from xtoken_core.chain.tables import SideTable
from xtoken_core.losses.chain import ChainOptions, inner_values, start_values
from xtoken_core.losses.chain_events import Inner, Starts
from xtoken_core.losses.chain_live import live_mask

Loss = Callable[[Tensor], dict[Key, Tensor]]
"""Expected loss per unit of text by class of chunk, from the student's logits `[states, V_s]`."""
TINY = 1e-30


def logits_of(table: Tensor) -> Tensor:
    """Return the logarithms of probabilities; zeros are e^-30."""
    return table.clamp(min=float(np.exp(-30.0))).log()


def cross_entropy(world: World) -> Loss:
    """Expect the student's own next token."""
    side = world.sides[0]

    def loss(logits: Tensor) -> dict[Key, Tensor]:
        return {("all", False): -(side.rate.unsqueeze(1) * side.truth * logits.log_softmax(1)).sum()}

    return loss


def kl_per_token(world: World, logits: Tensor) -> float:
    """Return how far a student is from the source, in nats per token of its own."""
    side = world.sides[0]
    terms = torch.xlogy(side.truth, side.truth) - side.truth * logits.log_softmax(1)
    return float((side.rate.unsqueeze(1) * terms).sum() / side.rate.sum())


def likelihood_matching(world: World, temperature: float) -> Loss:
    """Compare the likelihoods of chunks as two coins (ALM)."""
    truth = logits_of(world.sides[1].truth).log_softmax(1)
    items: dict[Key, list[Any]] = defaultdict(list)
    for (key, rows, tokens), rate in world.chunks.items():
        log_p = sum(truth[row, token] for row, token in zip(rows[1], tokens[1], strict=False))
        items[key].append((rate, float(log_p), rows[0], tokens[0]))

    prepared = {}
    for key, entries in items.items():
        owner = torch.tensor([n for n, (_, _, _, tokens) in enumerate(entries) for _ in tokens])
        row = torch.tensor([r for _, _, rows, tokens in entries for r, _ in zip(rows, tokens, strict=False)])
        token = torch.tensor([x for _, _, _, tokens in entries for x in tokens])
        rate, log_p = (torch.tensor([entry[i] for entry in entries], dtype=torch.float64) for i in (0, 1))
        prepared[key] = owner, row, token, rate, (log_p / temperature).clamp(max=-1e-10)

    def loss(logits: Tensor) -> dict[Key, Tensor]:
        log_q = logits.log_softmax(1)
        found = {}
        for key, (owner, row, token, rate, a) in prepared.items():
            b = torch.zeros_like(a).index_add(0, owner, log_q[row, token]) / temperature
            b = b.clamp(max=-1e-10)
            tails = torch.log(-torch.expm1(a)), torch.log(-torch.expm1(b))
            values = a.exp() * (a - b) + tails[0].exp() * (tails[0] - tails[1])
            found[key] = (rate * values).sum()
        return found

    return loss


def chain(world: World, tables: ChainTables, options: ChainOptions) -> Loss:
    """Sum the chain divergence's terms, each distinct one once."""
    teacher = logits_of(world.sides[1].truth)
    starts = _starts(world, tables, options)
    inner = [_inner(world, tables, holder, options) for holder in (0, 1)]

    def loss(logits: Tensor) -> dict[Key, Tensor]:
        found: dict[Key, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
        for key, (events, rate) in starts.items():
            flags = {"conditioning": options.conditioning}
            values = start_values(logits[events.student_row], teacher[events.teacher_row], events, tables, **flags)
            found[key] = found[key] + (rate * values).sum()
        sides = (tables.student, tables.teacher)
        for holder, groups in enumerate(inner):
            for key, (events, rate) in groups.items():
                rows = logits[events.student_row], teacher[events.teacher_row]
                parts = sides[holder], sides[1 - holder], tables.classes
                values = inner_values(rows[holder], rows[1 - holder], events, *parts, holder == 0)
                found[key] = found[key] + (rate * values).sum()
        return dict(found)

    return loss


def _starts(world: World, tables: ChainTables, options: ChainOptions) -> dict[Key, tuple[Starts, Tensor]]:
    """Take together the starts that have the same rows and the same live tokens."""
    after = [range(len(world.sides[k].truth[0])) for k in (0, 1)]
    live = [
        live_mask(table.live, torch.tensor(after[1 - k])).numpy() if options.conditioning else None
        for k, table in enumerate((tables.student, tables.teacher))
    ]
    groups = [None if mask is None else np.unique(mask, axis=0, return_inverse=True)[1].reshape(-1) for mask in live]
    merged: dict[Any, list[Any]] = {}
    for (key, rows, first, before), rate in world.starts.items():
        name: tuple[Any, ...] = (key, rows)
        for k in (0, 1):
            if groups[k] is not None:
                last = before[1 - k]
                name += (groups[k][last], None if live[k][last, first[k]] else first[k])
        merged.setdefault(name, [0.0, rows, first, before])[0] += rate
    by_key: dict[Key, list[Any]] = defaultdict(list)
    for name, entry in merged.items():
        by_key[name[0]].append(entry)
    found = {}
    for key, entries in by_key.items():
        columns = [torch.tensor([entry[i][k] for entry in entries]) for i in (1, 2, 3) for k in (0, 1)]
        events = Starts(torch.arange(len(entries)), *columns, torch.ones(len(entries), dtype=torch.bool))
        found[key] = events, torch.tensor([entry[0] for entry in entries], dtype=torch.float64)
    return found


def _inner(world: World, tables: ChainTables, holder: int, options: ChainOptions) -> dict[Key, tuple[Inner, Tensor]]:
    """List the nodes inside one side's tokens, each distinct one with its rate."""
    side: SideTable = (tables.student, tables.teacher)[holder]
    start, piece, node = (x.tolist() for x in (side.spelling_start, side.piece, side.node))
    slots = side.slot_start.diff().tolist()
    bare = side.bare_space.tolist()
    merged: dict[Key, dict[tuple[int, int, int], float]] = defaultdict(lambda: defaultdict(float))
    for (key, rows, tokens), rate in world.chunks.items():
        if len(tokens[holder]) != 1:
            continue
        token, others = tokens[holder][0], tokens[1 - holder]
        for n, other in enumerate(others):
            at = start[token] + n
            if at >= start[token + 1] or piece[at] != other:
                break
            last = n + 1 == len(others)
            if (last and not options.end_terms) or node[at] < 0:
                continue
            if (bare[node[at]] and not options.bare_space) or (holder == 0 and slots[node[at]] < 2):
                continue
            merged[key][rows[holder][0], rows[1 - holder][n + 1], node[at]] += rate
    found = {}
    for key, entries in merged.items():
        own, fresh, nodes = (torch.tensor(column) for column in zip(*entries, strict=True))
        rows_of = (own, fresh) if holder == 0 else (fresh, own)
        rates = torch.tensor(list(entries.values()), dtype=torch.float64)
        ends = torch.zeros(len(entries), dtype=torch.bool)  # only sums over all nodes are wanted here
        found[key] = Inner(torch.arange(len(entries)), *rows_of, nodes, ends), rates
    return found
