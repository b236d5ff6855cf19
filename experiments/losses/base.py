"""Base of the references: both vocabularies as bytes, both sides' log-probabilities, and where each chunk lies."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from experiments.losses.groups import InGroups, Positions, Side, Tokens, make_groups
from xtoken_core.alignment.tables import token_table
from xtoken_core.config.loss import LossConfig
from xtoken_core.errors import ConfigError
from xtoken_core.losses.base import ChunkLoss
from xtoken_core.losses.common import Divergence, LossInput, LossTeacher
from xtoken_core.losses.lazy_logits import cut

LOWEST = -80.0
"""Lowest logarithm in a divergence: keeps values and gradients of tokens with logits of -inf finite in float32."""


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
        whole, positions = [], []
        widths = len(self.student_bytes), len(self.teacher_bytes)
        values = (student_logits, pairing.student_targets), (inputs.teacher_logits, pairing.teacher_targets)
        for (logits, targets), width, (first, size) in zip(values, widths, found, strict=True):
            logits = cut(logits, width)
            targets = targets.clamp(min=0, max=logits.shape[-1] - 1).flatten()
            whole.append(logits.flatten(0, 1))
            positions.append(Positions(targets, first[chunk], size[chunk], len(targets) // max(B, 1)))
        dtype = torch.promote_types(student_logits.dtype, torch.float32)
        result = torch.zeros(B * P, dtype=dtype, device=student_logits.device)
        if len(chunk):
            groups = make_groups(*positions, limits=[self.elements // width for width in widths])
            keep = student_logits.numel() <= self.kept
            values_of = InGroups.apply(*whole, self, groups, keep)  # type: ignore[no-untyped-call]  # torch leaves it bare
            result = result.index_add(0, chunk, values_of.to(dtype))
        return Divergence((result.view(B, P),))

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


def shared_tokens(student: Sequence[bytes], teacher: Sequence[bytes], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the ids of tokens with the same bytes, `[n]` of each side; the lowest id of equal ones."""
    ids: list[dict[bytes, int]] = [{}, {}]
    for known, pieces in zip(ids, (student, teacher), strict=True):
        for index, piece in enumerate(pieces):
            if piece:
                known.setdefault(piece, index)
    common = [piece for piece in ids[0] if piece in ids[1]]
    own, other = (torch.tensor([side[piece] for piece in common], device=device) for side in ids)
    return own, other


def divergence(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return `sum p (log p - log q)` over the last dimension; `0 log 0 = 0`, and no logarithm is below `LOWEST`."""
    return (p * (log_p.clamp(min=LOWEST) - log_q.clamp(min=LOWEST))).sum(-1)


def floored_log(x: Tensor) -> Tensor:
    """Return the logarithm, that of the smallest normal number for smaller ones."""
    return x.clamp(min=torch.finfo(x.dtype).tiny).log()
