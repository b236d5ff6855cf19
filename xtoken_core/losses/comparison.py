"""A student's logits beside its teachers': every divergence and the cross-entropy, before anything is averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from xtoken_core.losses.common import Divergence, Pairing
from xtoken_core.losses.cross_entropy import next_token_targets
from xtoken_core.losses.lazy_logits import HeadProjection, Logits, MeanLogits, RowLogits, row_logits
from xtoken_core.losses.teacher_loss import TeacherLoss
from xtoken_core.ops import get_op


class Values(NamedTuple):
    """What a loss is made of: each teacher's divergence, the cross-entropy and hits of every position."""

    divergences: tuple[Divergence, ...]
    losses: Float[Tensor, "B T_s"]
    hits: Bool[Tensor, "B T_s"]

    @property
    def differentiable(self) -> list[Tensor]:
        """The tensors that the loss's gradient goes through."""
        return [part for divergence in self.divergences for part in divergence.parts] + [self.losses]


@dataclass(frozen=True)
class ComparedTeacher:
    """One teacher of a micro-batch.

    Attributes:
        loss: How it is compared.
        logits: Its logits, in whatever form.
        columns: The tokens that are compared, where the mode chooses.
        pairing: Which positions belong together.
    """

    loss: TeacherLoss
    logits: Logits | MeanLogits
    columns: Tensor | None
    pairing: Pairing

    @property
    def some(self) -> Tensor | None:
        """The compared tokens, unless they are all."""
        return None if self.columns is None or self.columns.shape[0] == self.loss.vocab_size else self.columns

    def whole(self) -> tuple[Tensor, bool]:
        """Logits of every position, and whether they are those of `columns` alone."""
        if isinstance(self.logits, HeadProjection):
            return self.logits.logits(self.some), self.some is not None
        return (self.logits if isinstance(self.logits, Tensor) else self.logits.whole()), False

    def rows(self) -> tuple[RowLogits, bool]:
        """Logits of some positions, and whether they are those of `columns` alone."""
        if isinstance(self.logits, MeanLogits):
            return self.logits.rows(), False
        return row_logits(self.logits, self.loss.vocab_size, self.some), self.some is not None


def compare(
    batch: Mapping[str, Tensor],
    student_logits: Float[Tensor, "B T_s V_head"],
    teachers: Sequence[ComparedTeacher],
    *,
    trains_on_kd: bool,
) -> Values:
    """Everything at once, with a gradient for the student's logits.

    Args:
        batch: Holds the student's own tokens.
        student_logits: The whole head.
        teachers: What it is compared with.
        trains_on_kd: Whether gradients go through the divergences.
    """
    with_tokens = first_with_tokens(teachers) if trains_on_kd else None
    divergences = []
    with nullcontext() if trains_on_kd else torch.no_grad():
        for teacher in teachers:
            logits, gathered = teacher.whole()
            flags = {"gathered": gathered, "with_tokens": teacher is with_tokens}
            divergences.append(teacher.loss.compare(teacher.pairing, student_logits, logits, teacher.columns, **flags))
    tokens = next((each.tokens for each in divergences if each.tokens is not None), None)
    if tokens is None:
        tokens = get_op("cross_entropy", student_logits.device)(student_logits, next_token_targets(batch))
    return Values(tuple(divergences), *tokens)


def first_with_tokens(teachers: Sequence[ComparedTeacher]) -> ComparedTeacher | None:
    """The teacher whose divergence brings the cross-entropy along."""
    return next((teacher for teacher in teachers if teacher.loss.compares_with_tokens), None)
