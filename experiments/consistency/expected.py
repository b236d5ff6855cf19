"""Expected losses of a tabular student: every chunk of the source at its rate, the teacher exact."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from experiments.consistency.chain_terms import chain_terms
from experiments.consistency.exact import Key, World
from xtoken_core.chain import ChainTables
from xtoken_core.ops.chain.reference import ChainOptions

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
        return {("all", ""): -(side.rate.unsqueeze(1) * side.truth * logits.log_softmax(1)).sum()}

    return loss


def kl_per_token(world: World, logits: Tensor) -> float:
    """Return how far a student is from the source, in nats per token of its own."""
    side = world.sides[0]
    terms = torch.xlogy(side.truth, side.truth) - side.truth * logits.log_softmax(1)
    return float((side.rate.unsqueeze(1) * terms).sum() / side.rate.sum())


def likelihood_matching(world: World, temperature: float) -> Loss:
    """Compare the likelihoods of chunks as two coins (ALM)."""
    truth = logits_of(world.sides[1].truth).log_softmax(1)
    items: dict[Key, list[tuple[float, Sides, Sides]]] = defaultdict(list)
    for (key, rows, tokens), rate in world.chunks.items():
        items[key].append((rate, rows, tokens))
    prepared = {}
    for key, entries in items.items():
        rate = torch.tensor([entry[0] for entry in entries], dtype=torch.float64)
        owner, row, token = _flat(entries, 0)
        by_teacher = _flat(entries, 1)
        log_p = torch.zeros_like(rate).index_add(0, by_teacher[0], truth[by_teacher[1], by_teacher[2]])
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


Sides = tuple[tuple[int, ...], tuple[int, ...]]


def _flat(entries: list[tuple[float, Sides, Sides]], side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return chunk, state and token of every token of one side."""
    flat = [
        (n, row, token)
        for n, (_, rows, tokens) in enumerate(entries)
        for row, token in zip(rows[side], tokens[side], strict=False)
    ]
    owner, row, token = torch.from_numpy(np.array(flat, dtype=np.int64).reshape(-1, 3)).unbind(1)
    return owner, row, token


def chain(world: World, tables: ChainTables, options: ChainOptions, *, by_class: bool = True) -> Loss:
    """Sum the chain divergence's terms; arguments as for `chain_terms`."""
    terms = chain_terms(world, logits_of(world.sides[1].truth), tables, options, by_class=by_class)

    def loss(logits: Tensor) -> dict[Key, Tensor]:
        return {key: torch.stack([term(logits) for term in own]).sum() for key, own in terms.items()}

    return loss
