"""Chain tables and a text drawn at random, at any vocabulary sizes, with the shape of real pairs.

What is drawn follows the tables of tekken (130,076 tokens) with Gemma 3 (262,144): three quarters of the smaller
vocabulary are common tokens; every other token is spelled with two to four common tokens, popular first pieces more
often (Zipf's law); a token of either side cannot be followed by 2 to 3% of the other vocabulary, by intervals of places
and by groups of words. Ids of a common token differ between the sides, but their order is similar, as it is where both
vocabularies were built by frequency. Classes and nodes are derived from the spellings as in `xtoken_core.chain`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from xtoken_core.chain.build import build_piece_trie, find_roots
from xtoken_core.chain.spelling import Spellings
from xtoken_core.chain.tables import BROKEN, JOINED, KEPT, ChainTables, LiveTable, SideTable
from xtoken_core.losses.masks import kept_chunk_ids, predicted_ids, shifted_chunk_ids
from xtoken_core.ops.chain.events import SideTokens

COMMON = 0.75
"""Fraction of the smaller vocabulary."""
GROUPS = 480, 370
"""Groups of tokens by their end and by their beginning."""
RULES, RULE_LENGTH = 40, 60
"""Mean number of intervals per token, and of places per interval."""
SHAPES = {"1:1": 0.82, "1:n": 0.09, "n:1": 0.07, "m:n": 0.02}
"""Fractions of chunks by shape, as in plain multilingual text."""


@dataclass(frozen=True)
class DrawnText:
    """One sample on both sides.

    Attributes:
        ids: `[1, T]` int64 per side.
        chunk_id: `[1, T]` int64 per side, -1 behind the last whole chunk.
        chunks: Number of chunks, `P`.
    """

    ids: tuple[Tensor, Tensor]
    chunk_id: tuple[Tensor, Tensor]
    chunks: int


def draw_tables(student_vocab: int, teacher_vocab: int, seed: int = 0) -> ChainTables:
    """Draw the tables of two vocabularies."""
    rng = np.random.default_rng(seed)
    common = int(COMMON * min(student_vocab, teacher_vocab))
    student = np.sort(rng.choice(student_vocab, common, replace=False))
    teacher = np.sort(rng.choice(teacher_vocab, common, replace=False))
    order = np.argsort(np.arange(common) + rng.normal(0, 0.05 * common, common))
    teacher = teacher[order]
    spelled = (_spellings(rng, student_vocab, student, teacher), _spellings(rng, teacher_vocab, teacher, student))
    roots = find_roots(*spelled, np.zeros((0, 2), np.int64))
    sides = []
    for k, (own, other) in enumerate(((roots.student, roots.teacher), (roots.teacher, roots.student))):
        paths = build_piece_trie(spelled[k], other, np.zeros(0, np.int64))
        nodes = {field.name: torch.from_numpy(getattr(paths, field.name)) for field in fields(paths)}
        sides.append(
            SideTable(
                root=torch.from_numpy(own.astype(np.int32)),
                spelling_start=torch.from_numpy(spelled[k].start.astype(np.int32)),
                piece=torch.from_numpy(spelled[k].piece.astype(np.int32)),
                status=torch.from_numpy(spelled[k].status),
                live=_live(rng, len(other), spelled[k].first),
                **nodes,
            )
        )
    return ChainTables(sides[0], sides[1], roots.count, roots.common)


def _spellings(rng: np.random.Generator, size: int, own: np.ndarray, other: np.ndarray) -> Spellings:
    """Spell common tokens with their partner and all but eight others with two to four common tokens."""
    count = rng.integers(2, 5, size)
    count[own] = 1
    none = np.setdiff1d(np.arange(size), own)[:8]
    count[none] = 0
    start = np.concatenate([[0], np.cumsum(count)])
    piece = other[rng.integers(0, len(other), start[-1])]
    longer = np.flatnonzero(count > 1)
    piece[start[longer]] = other[_popular(rng, len(longer), len(other))]
    piece[start[own]] = other
    status = np.zeros(size, np.uint8)
    status[none] = 1
    return Spellings(start, piece, status)


def _popular(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    """Draw by Zipf's law: log-uniform ranks."""
    return np.minimum(np.exp(rng.random(n) * np.log(size)).astype(np.int64), size) - 1


def _live(rng: np.random.Generator, after: int, first: np.ndarray) -> LiveTable:
    """Draw groups, and intervals of the places of first pieces."""
    tails, heads = GROUPS
    state = rng.choice(np.array([BROKEN, KEPT, JOINED], np.uint8), (tails, heads), p=(0.02, 0.33, 0.65))
    counts = rng.geometric(1 / RULES, after)
    R = int(counts.sum())
    low = rng.integers(0, after, R)
    arrays = {
        "tail": rng.integers(0, tails, after),
        "head": rng.integers(0, heads, len(first)),
        "position": np.where(first >= 0, rng.permutation(after)[first], after)[None],
        "point": rng.integers(0, after, R),
        "low": low,
        "high": np.minimum(low + rng.geometric(1 / RULE_LENGTH, R), after),
        "rule_start": np.concatenate([[0], np.cumsum(counts)]),
        "tail_start": np.zeros(after),
        "tail_count": np.zeros(after),
        "right": np.full(after, -1),
    }
    tensors = {name: torch.from_numpy(values.astype(np.int32)) for name, values in arrays.items()}
    return LiveTable(state=torch.from_numpy(state), width=after + 1, depth=1, **tensors)


def draw_text(tables: ChainTables, tokens: int, seed: int = 0) -> DrawnText:
    """Draw chunks until one side has that many tokens; what is missing of the other is padding."""
    rng = np.random.default_rng(seed)
    sides = tables.student, tables.teacher
    roots = [side.root.numpy() for side in sides]
    pieces = [side.piece.numpy() for side in sides]
    starts = [side.spelling_start.numpy() for side in sides]
    counts = [np.diff(start) for start in starts]
    single = np.flatnonzero(counts[0] == 1)
    long = [np.flatnonzero(count > 1) for count in counts]
    order = [each[np.argsort(roots[k][each], kind="stable")] for k, each in enumerate(long)]
    ids: tuple[list[int], list[int]] = ([], [])
    chunk_id: tuple[list[int], list[int]] = ([], [])
    chunks = 0
    while True:
        shape = rng.choice(list(SHAPES), p=list(SHAPES.values()))
        made: list[list[int]] = [[], []]
        if shape in ("1:1", "m:n"):
            for _ in range(2 if shape == "m:n" else 1):
                token = int(single[_popular(rng, 1, len(single))[0]])
                made[0].append(token)
                made[1].append(int(pieces[0][starts[0][token]]))
        else:
            k = 0 if shape == "1:n" else 1
            token = int(order[k][_popular(rng, 1, len(order[k]))[0]])
            made[k] = [token]
            made[1 - k] = pieces[k][starts[k][token] : starts[k][token + 1]].tolist()
        if any(len(ids[k]) + len(made[k]) > tokens for k in (0, 1)):
            break
        for k in (0, 1):
            ids[k].extend(made[k])
            chunk_id[k].extend([chunks] * len(made[k]))
        chunks += 1
    padded = [torch.tensor([row + [0] * (tokens - len(row))]) for row in ids]
    chunk = [torch.tensor([row + [-1] * (tokens - len(row))]) for row in chunk_id]
    return DrawnText((padded[0], padded[1]), (chunk[0], chunk[1]), chunks)


def side_tokens(ids: Int[Tensor, "B T"], chunk_id: Int[Tensor, "B T"], usable: Bool[Tensor, "B P"]) -> SideTokens:
    """Return one side's tokens at the positions that predict them.

    Args:
        ids: The tokens.
        chunk_id: Chunk of each token as aligned, not shifted.
        usable: Chunks that are compared.
    """
    return SideTokens(kept_chunk_ids(shifted_chunk_ids(chunk_id), usable), predicted_ids(ids), ids, chunk_id)
