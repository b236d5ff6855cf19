"""Base of the references: both vocabularies as bytes, both sides' log-probabilities, and where each chunk lies.

Groups of chunks whose distributions are in memory together.

For the gradient a group's graph is kept, or with many logits the group is evaluated once more.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from xtoken_core.alignment.tables import token_table
from xtoken_core.config.loss import LossConfig
from xtoken_core.errors import ConfigError
from xtoken_core.losses.base import ChunkLoss
from xtoken_core.losses.common import Divergence, LossInput, LossTeacher
from xtoken_core.losses.lazy_logits import cut

LOWEST = -80.0
"""Lowest logarithm in a divergence: keeps values and gradients of tokens with logits of -inf finite in float32."""


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


class Whole(NamedTuple):
    """One side of a micro-batch.

    Attributes:
        logits: `[N, V]` of the flattened batch.
        targets: `[N]` the token that each position predicts.
        first: `[C]` first position of each chunk.
        size: `[C]` its positions.
        width: Positions of a sample, `T`.
    """

    logits: Tensor
    targets: Tensor
    first: Tensor
    size: Tensor
    width: int


class ReferenceLoss(ChunkLoss):
    """A loss over chunks that reads both vocabularies as bytes.

    Chunks are evaluated in groups. For the gradient their graphs are kept, or with many logits they are evaluated once
    more: memory is then that of a group's distributions.

    Attributes:
        student_bytes: By id, the bytes of the student's tokens; empty for one that spells nothing.
        teacher_bytes: Likewise.
        elements: Largest number of one side's probabilities in a group of several chunks.
        kept: Largest number of the student's logits in a micro-batch with which the graphs are kept: several float32
            values each.
    """

    mode = "custom"
    reads_teacher_targets = True
    elements: ClassVar[int] = 1 << 26
    kept: ClassVar[int] = 1 << 28

    def __init__(
        self, config: LossConfig, teacher: LossTeacher, *, index: int, student_vocab_size: int, device: torch.device
    ) -> None:
        """Read both vocabularies; arguments as for `Loss`."""
        super().__init__(config, teacher, index=index, student_vocab_size=student_vocab_size, device=device)
        if teacher.tokenizers is None:
            raise ConfigError("this loss reads both tokenizers: run it by xtoken run --loss")
        self.student_bytes, self.teacher_bytes = map(written_bytes, teacher.tokenizers())

    @cached_property
    def shared(self) -> tuple[Tensor, Tensor]:
        """The ids of tokens with the same bytes, `[n]` of each side; the lowest id of equal ones."""
        ids: list[dict[bytes, int]] = [{}, {}]
        for known, pieces in zip(ids, (self.student_bytes, self.teacher_bytes), strict=True):
            for index, piece in enumerate(pieces):
                if piece:
                    known.setdefault(piece, index)
        common = [piece for piece in ids[0] if piece in ids[1]]
        own, other = (torch.tensor([side[piece] for piece in common], device=self.device) for side in ids)
        return own, other

    @classmethod
    def bytes_per_position(cls, student_vocab_size: int, teacher_vocab_size: int) -> int:
        """Return the bytes of both sides' log-probabilities in float32, and the student's gradient.

        A lower bound: what `values` makes of them comes on top.
        """
        return 4 * (3 * student_vocab_size + 2 * teacher_vocab_size)

    def evaluate(self, inputs: LossInput[Tensor]) -> Divergence:
        """Compute the value of every chunk; one that is not compared has 0."""
        pairing, student_logits = inputs.pairing, inputs.student_logits
        B, P = student_logits.shape[0], pairing.max_chunks
        assert pairing.teacher_targets is not None
        found = [_layout(each, P) for each in pairing.chunk_ids]
        chunk = torch.nonzero((found[0][1] > 0) & (found[1][1] > 0)).squeeze(1)
        sides = []
        widths = len(self.student_bytes), len(self.teacher_bytes)
        values = (student_logits, pairing.student_targets), (inputs.teacher_logits.detach(), pairing.teacher_targets)
        for (logits, targets), width, (first, size) in zip(values, widths, found, strict=True):
            logits = cut(logits, width)
            targets = targets.clamp(min=0, max=logits.shape[-1] - 1).flatten()
            sides.append(Whole(logits.flatten(0, 1), targets, first[chunk], size[chunk], len(targets) // max(B, 1)))
        dtype = torch.promote_types(student_logits.dtype, torch.float32)
        result = torch.zeros(B * P, dtype=dtype, device=student_logits.device)
        if len(chunk):
            keep = student_logits.numel() <= self.kept
            of_groups = [self._of_group(sides, group, keep=keep) for group in self._groups(sides)]
            result = result.index_add(0, chunk, torch.cat(of_groups).to(dtype))
        return Divergence((result.view(B, P),))

    def _groups(self, sides: Sequence[Whole]) -> Iterator[slice]:
        """Yield all chunks in groups of at most `elements` probabilities a side, where a chunk has no more."""
        limits = [self.elements // side.logits.shape[1] for side in sides]
        ends = [torch.stack((side.first, side.first + side.size), 1).tolist() for side in sides]
        start, spans = 0, [each[0] for each in ends]
        for chunk, own in enumerate(zip(*ends, strict=True)):
            wider = [[min(a, c), max(b, d)] for (a, b), (c, d) in zip(spans, own, strict=True)]
            if chunk > start and any(b - a >= limit for (a, b), limit in zip(wider, limits, strict=True)):
                yield slice(start, chunk)
                start, wider = chunk, list(own)
            spans = wider
        yield slice(start, len(ends[0]))

    def _of_group(self, sides: Sequence[Whole], chunks: slice, *, keep: bool) -> Tensor:
        """Return the values of successive chunks.

        Args:
            sides: Both sides.
            chunks: The chunks.
            keep: Keep the graph for the gradient instead of evaluating the group once more.
        """
        rows, tokens, places = [], [], []
        for side in sides:
            first, size = side.first[chunks], side.size[chunks]
            low = int(first.min())
            rows.append(slice(low, min(int((first + size).max()) + 1, len(side.targets))))  # and the one behind them
            places.append((side.targets[rows[-1]], first - low, size))
            tokens.append(Tokens(*(each.tolist() for each in places[-1]), low, side.width))
        prepared = self.prepare(*tokens)

        def values(student: Tensor) -> Tensor:
            both = zip((student, sides[1].logits[rows[1]]), places, tokens, strict=True)
            return self.values(*(Side(self.log_probabilities(x), *at, max(own.size)) for x, at, own in both), prepared)

        logits = sides[0].logits[rows[0]]
        if keep:
            return values(logits)
        again: Tensor = checkpoint(values, logits, use_reentrant=False, preserve_rng_state=False)
        return again

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Return log-probabilities, in float32 or better."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.log_softmax(logits if self.config.temperature == 1 else logits / self.config.temperature, dim=1)

    def prepare(self, student: Tokens, teacher: Tokens) -> Any:
        """Compute the part of `values` that depends on a group's tokens alone, once for value and gradient."""
        return None

    @abstractmethod
    def values(self, student: Side, teacher: Side, prepared: Any) -> Tensor:
        """Return `[C]` values of a group's chunks, differentiable by the student's log-probabilities.

        Args:
            student: The student's view.
            teacher: The teacher's.
            prepared: The result of `prepare`.
        """


def _layout(chunk_id: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Return `[B * P]` first position and size of each chunk; positions count through the flattened batch."""
    B, T = chunk_id.shape
    spare = B * chunks
    group = torch.where(chunk_id >= 0, chunk_id + chunks * torch.arange(B, device=chunk_id.device).unsqueeze(1), spare)
    group = group.flatten()
    place = torch.arange(B * T, device=chunk_id.device)
    first = torch.full((spare + 1,), B * T, device=chunk_id.device).scatter_reduce(0, group, place, "amin")
    size = torch.zeros_like(first).index_add(0, group, torch.ones_like(group))
    return first[:-1], size[:-1]


def written_bytes(tokenizer: Any) -> list[bytes]:
    """Return by id the bytes of a tokenizer's tokens; empty for specials and for bytes that it writes otherwise."""
    table = token_table(tokenizer)
    return [b"" if index in table.unused_bytes else bytes(piece) for index, piece in enumerate(table.pieces)]


def divergence(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return `sum p (log p - log q)` over the last dimension; `0 log 0 = 0`, and no logarithm is below `LOWEST`."""
    return (p * (log_p.clamp(min=LOWEST) - log_q.clamp(min=LOWEST))).sum(-1)


def floored_log(x: Tensor) -> Tensor:
    """Return the logarithm, that of the smallest normal number for smaller ones."""
    return x.clamp(min=torch.finfo(x.dtype).tiny).log()
