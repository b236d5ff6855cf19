"""Both sides' exact next-token distributions, and every chunk of the source with its rate."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.consistency.source import KINDS, Source, sample_texts

State = tuple[int, tuple[int, ...]]
"""The kind of the unit before, and a unit's tokens so far."""


@dataclass
class Side:
    """One tokenizer's view of the source.

    Attributes:
        pieces: Each unit's tokens.
        index: Number of each state.
        truth: `[states, V]` float64, the exact next-token distributions.
        rate: `[states]` float64, how often a state is met, per unit of text.
    """

    pieces: list[tuple[int, ...]]
    index: dict[State, int]
    truth: Tensor
    rate: Tensor


def view(source: Source, tokenizer: Any) -> Side:
    """Sum over the units that a state's tokens begin.

    Raises:
        ValueError: The tokenizer cuts a text elsewhere than at its units, or writes one without tokens.
    """
    pieces = [tuple(tokenizer.encode(unit, add_special_tokens=False)) for unit in source.units]
    for units in sample_texts(source, 60, 40, seed=99):
        text = "".join(source.units[u] for u in units)
        if tuple(tokenizer.encode(text, add_special_tokens=False)) != tuple(i for u in units for i in pieces[u]):
            raise ValueError("the tokenizer does not keep the source's units apart")
    K, V = len(source.stationary), len(tokenizer)
    first = np.zeros((K, V))
    for u, tokens in enumerate(pieces):
        first[:, tokens[0]] += source.weight[:, u]
    mass: dict[State, np.ndarray] = defaultdict(lambda: np.zeros(V))
    for u, tokens in enumerate(pieces):
        for kind in range(K):
            weight = source.weight[kind, u]
            for n in range(1, len(tokens)) if weight else ():
                mass[kind, tokens[:n]][tokens[n]] += weight
            if weight:
                mass[kind, tokens] += weight * first[source.kind[u]]
    longer = {state: state[1] for u in range(len(pieces)) for state in _prefixes(source, pieces, u)}
    ended = {(kind, tokens): u for u, tokens in enumerate(pieces) for kind in range(K) if source.weight[kind, u]}
    names: dict[State, int] = {}
    rows: list[np.ndarray] = []
    numbers: dict[State, int] = {}
    for state, row in mass.items():
        # After a unit that no other continues, only its kind matters: one row stands for all of them.
        name = state if state in longer or state not in ended else (-1 - int(source.kind[ended[state]]), ())
        if name not in numbers:
            numbers[name] = len(rows)
            rows.append(np.zeros(V))
        names[state] = numbers[name]
        rows[numbers[name]] += source.stationary[state[0]] * row
    table = torch.from_numpy(np.stack(rows))
    return Side(pieces, names, table / table.sum(1, keepdim=True), table.sum(1))


def _prefixes(source: Source, pieces: list[tuple[int, ...]], unit: int) -> list[State]:
    """Return the states inside a unit."""
    tokens = pieces[unit]
    kinds = [kind for kind in range(len(source.stationary)) if source.weight[kind, unit]]
    return [(kind, tokens[:n]) for kind in kinds for n in range(1, len(tokens))]


@dataclass
class Chunk:
    """A chunk of one unit: where its tokens lie in the unit's tokens on both sides."""

    student: slice
    teacher: slice

    @property
    def shape(self) -> str:
        """`1:1`, `1:n`, `n:1` or `m:n`."""
        s, t = (part.stop - part.start for part in (self.student, self.teacher))
        return "1:1" if s == t == 1 else "1:n" if s == 1 else "n:1" if t == 1 else "m:n"


def chunks_of(student: tuple[int, ...], teacher: tuple[int, ...], lengths: tuple[list[int], list[int]]) -> list[Chunk]:
    """Cut a unit where both sides end a token."""
    ends = [
        np.cumsum([length[i] for i in ids]).tolist() for length, ids in zip(lengths, (student, teacher), strict=True)
    ]
    common = sorted(set(ends[0]) & set(ends[1]))
    found, at = [], (0, 0)
    for end in common:
        stop = ends[0].index(end) + 1, ends[1].index(end) + 1
        found.append(Chunk(slice(at[0], stop[0]), slice(at[1], stop[1])))
        at = stop
    return found


Key = tuple[str, str]
"""A chunk's shape and the kind of its unit, of `source.KINDS`."""


@dataclass
class World:
    """A source seen by two tokenizers; rates are per unit of text.

    Attributes:
        source: The source.
        sides: The student's view and the teacher's.
        chunks: Rate of each chunk: its key, each side's rows (the states before each of its tokens and after the last)
            and each side's tokens.
        starts: Rate of each start of a chunk: its key, rows, first tokens and the tokens before it, of the student and
            of the teacher each.
    """

    source: Source
    sides: tuple[Side, Side]
    chunks: dict[tuple[Key, tuple[Rows, Rows], tuple[Rows, Rows]], float]
    starts: dict[tuple[Key, Pair, Pair, Pair], float]

    @cached_property
    def rates(self) -> dict[Key, float]:
        """Rate of each class of chunks."""
        total: dict[Key, float] = defaultdict(float)
        for (key, _, _), rate in self.chunks.items():
            total[key] += rate
        return total


Rows = tuple[int, ...]
Pair = tuple[int, int]


def make_world(source: Source, student: Any, teacher: Any) -> World:
    """List every chunk after every unit that can come before it."""
    sides = view(source, student), view(source, teacher)
    lengths = [[len(tokenizer.decode([i]).encode()) for i in range(len(tokenizer))] for tokenizer in (student, teacher)]
    ends: dict[tuple[int, Pair], dict[Pair, float]] = defaultdict(lambda: defaultdict(float))
    for u, kind_of_unit in enumerate(source.kind.tolist()):
        for kind, stationary in enumerate(source.stationary.tolist()):
            if rate := stationary * float(source.weight[kind, u]):
                ours, theirs = ((side.index[kind, side.pieces[u]], side.pieces[u][-1]) for side in sides)
                ends[kind_of_unit, ours][theirs] += rate
    world = World(source, sides, defaultdict(float), defaultdict(float))
    boundaries = {
        kind: [(own, other, rate) for (k, own), others in ends.items() if k == kind for other, rate in others.items()]
        for kind in range(len(source.stationary))
    }
    for u in range(len(source.units)):
        chunks = chunks_of(sides[0].pieces[u], sides[1].pieces[u], (lengths[0], lengths[1]))
        for kind, stationary in enumerate(source.stationary.tolist()):
            if weight := float(source.weight[kind, u]):
                for n, chunk in enumerate(chunks):
                    _add(world, u, kind, chunk, weight, boundaries[kind] if n == 0 else stationary)
    return world


def _add(
    world: World, unit: int, kind: int, chunk: Chunk, weight: float, before: float | list[tuple[Pair, Pair, float]]
) -> None:
    """Count a chunk.

    Args:
        world: Its rates are added to.
        unit: The chunk's unit.
        kind: Kind of the unit before.
        chunk: The chunk.
        weight: Probability of the unit after that kind.
        before: For a unit's first chunk each side's state and last token before it, with their rate; else the rate.
    """
    key = chunk.shape, KINDS[world.source.kind[unit]]
    inside, tokens, last = [], [], []
    for side, part in zip(world.sides, (chunk.student, chunk.teacher), strict=True):
        pieces = side.pieces[unit]
        inside.append(tuple(side.index[kind, pieces[:n]] for n in range(max(part.start, 1), part.stop + 1)))
        tokens.append(pieces[part])
        last.append(pieces[part.start - 1])
    both, first = (tokens[0], tokens[1]), (tokens[0][0], tokens[1][0])
    if isinstance(before, float):
        rate = before * weight
        world.chunks[key, (inside[0], inside[1]), both] += rate
        world.starts[key, (inside[0][0], inside[1][0]), first, (last[0], last[1])] += rate
        return
    for own, other, rate in before:
        rate *= weight
        world.chunks[key, ((own[0], *inside[0]), (other[0], *inside[1])), both] += rate
        world.starts[key, (own[0], other[0]), first, (own[1], other[1])] += rate
