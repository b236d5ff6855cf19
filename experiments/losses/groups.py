"""Groups of chunks whose distributions are in memory together.

For the gradient a group's graph is kept, or with many logits the group is evaluated once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Tokens:
    """One model's tokens of a group of chunks, on the CPU.

    Attributes:
        targets: The token that each position of the group predicts.
        first: A chunk's first position.
        size: Its positions.
        offset: The group's first position in the flattened batch.
        width: Positions of a sample, `T`.
    """

    targets: list[int]
    first: list[int]
    size: list[int]
    offset: int
    width: int

    def of(self, chunk: int) -> list[int]:
        """Return a chunk's tokens."""
        return self.targets[self.first[chunk] : self.first[chunk] + self.size[chunk]]

    def has_next(self, position: int) -> bool:
        """Return True if the next position is of the same sample."""
        return (self.offset + position + 1) % self.width > 0


@dataclass(frozen=True)
class Side:
    """One model's view of a group of chunks.

    Attributes:
        log_p: `[N, V]` log-probabilities at the group's positions.
        targets: `[N]` the token that each position predicts.
        first: `[C]` a chunk's first position.
        size: `[C]` its positions.
        longest: Positions of the longest chunk.
    """

    log_p: Tensor
    targets: Tensor
    first: Tensor
    size: Tensor
    longest: int

    def own(self) -> Tensor:
        """Return `[N]` log-probabilities of the text's own tokens."""
        return self.log_p.gather(1, self.targets.unsqueeze(1)).squeeze(1)

    def likelihood(self, positions: Tensor, chunks: Tensor) -> Tensor:
        """Return `[C]` sums of the own tokens' log-probabilities over the first `positions` of some chunks."""
        own, total = self.own(), self.log_p.new_zeros(len(chunks))
        for n in range(self.longest):
            at = (self.first[chunks] + n).clamp(max=len(own) - 1)
            total = total + torch.where(n < positions, own[at], 0.0)
        return total

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return `[n]` log-probabilities at pairs of a position and a token."""
        return self.log_p.flatten().index_select(0, rows * self.log_p.shape[1] + columns)


class Positions(NamedTuple):
    """One side of a micro-batch.

    Attributes:
        targets: `[N]` the token that each position of the flattened batch predicts.
        first: `[C]` first position of each chunk.
        size: `[C]` its positions.
        width: Positions of a sample, `T`.
    """

    targets: Tensor
    first: Tensor
    size: Tensor
    width: int


@dataclass(frozen=True)
class Group:
    """Successive chunks.

    Attributes:
        chunks: The chunks.
        rows: By side, the positions of these chunks and the one behind them.
        tokens: By side, its tokens.
        positions: By side, targets, first positions and sizes on the logits' device, from the group's first row on.
        memo: The result of the loss's `prepare`, once it has been computed.
    """

    chunks: slice
    rows: tuple[slice, slice]
    tokens: tuple[Tokens, Tokens]
    positions: tuple[tuple[Tensor, Tensor, Tensor], ...]
    memo: list[Any] = field(default_factory=list)


def make_groups(student: Positions, teacher: Positions, limits: Sequence[int]) -> list[Group]:
    """Return all chunks in groups of at most `limits` positions a side, where a chunk has no more.

    Args:
        student: The student's side.
        teacher: The teacher's side, of the same chunks.
        limits: Largest number of positions, by side.
    """
    sides = (student, teacher)
    lists = [(side.targets.tolist(), side.first.tolist(), side.size.tolist()) for side in sides]
    groups, start, spans = [], 0, [[0, 0], [0, 0]]
    for chunk in range(len(lists[0][1]) + 1):
        if chunk < len(lists[0][1]):
            own = [(first[chunk], first[chunk] + size[chunk]) for _, first, size in lists]
            wider = [[min(span[0], a), max(span[1], b)] for span, (a, b) in zip(spans, own, strict=True)]
            if chunk > start and all(b - a < limit for (a, b), limit in zip(wider, limits, strict=True)):
                spans = wider
                continue
        if chunk > start:
            groups.append(_group(slice(start, chunk), spans, sides, lists))
        start, spans = chunk, [list(each) for each in own]
    return groups


def _group(
    chunks: slice, spans: list[list[int]], sides: tuple[Positions, Positions], lists: list[tuple[list[int], ...]]
) -> Group:
    rows, tokens, positions = [], [], []
    for (low, high), side, (targets, first, size) in zip(spans, sides, lists, strict=True):
        high = min(high + 1, len(targets))
        rows.append(slice(low, high))
        tokens.append(Tokens(targets[low:high], [x - low for x in first[chunks]], size[chunks], low, side.width))
        positions.append((side.targets[low:high], side.first[chunks] - low, side.size[chunks]))
    return Group(chunks, (rows[0], rows[1]), (tokens[0], tokens[1]), tuple(positions))


class InGroups(torch.autograd.Function):
    """Values of all chunks, group by group."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, loss: Any, groups: list[Group], keep: bool) -> Tensor:
        """Return `[C]` values.

        Args:
            ctx: The operation's context.
            student: `[N, V_s]` logits.
            teacher: `[M, V_t]` logits; no gradient.
            loss: A `ReferenceLoss`.
            groups: Of all chunks.
            keep: Keep each group's graph for the gradient instead of evaluating it once more.
        """
        ctx.loss, ctx.groups, ctx.graphs = loss, groups, []
        keep = keep and ctx.needs_input_grad[0]
        ctx.save_for_backward(student, teacher)
        if not keep:
            return torch.cat([_values(loss, group, student[group.rows[0]], teacher) for group in groups])
        ctx.graphs = [_graph(loss, group, student, teacher) for group in groups]
        return torch.cat([values.detach() for _, values in ctx.graphs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return the gradient of the student's logits."""
        student, teacher = ctx.saved_tensors
        gradient = torch.zeros_like(student)
        for group in ctx.groups:
            leaf, values = ctx.graphs.pop(0) if ctx.graphs else _graph(ctx.loss, group, student, teacher)
            gradient[group.rows[0]] += torch.autograd.grad(values, leaf, upstream[group.chunks])[0]
        return gradient, None, None, None, None


def _graph(loss: Any, group: Group, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Return the group's logits of the student as a leaf, and its values."""
    leaf = student[group.rows[0]].detach().requires_grad_()
    with torch.enable_grad():
        return leaf, _values(loss, group, leaf, teacher)


def _values(loss: Any, group: Group, student: Tensor, teacher: Tensor) -> Tensor:
    if not group.memo:
        group.memo.append(loss.prepare(*group.tokens))
    sides = [
        Side(loss.log_probabilities(logits), *positions, max(tokens.size))
        for logits, positions, tokens in zip(
            (student, teacher[group.rows[1]]), group.positions, group.tokens, strict=True
        )
    ]
    values: Tensor = loss.values(*sides, group.memo[0])
    return values
