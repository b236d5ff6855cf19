"""The interface of a loss: one teacher's divergence as a function of a micro-batch, and its reduction to a number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core import schema
from xtoken_core.config.loss import LossConfig, LossMode
from xtoken_core.errors import ConfigError, InputError
from xtoken_core.losses.common import (
    ChunkView,
    Divergence,
    LossInput,
    LossTeacher,
    NumberedBatch,
    Pairing,
    Scalar,
    TeacherTerm,
    masked_sum,
    partial_mean,
)
from xtoken_core.losses.lazy_logits import HeadProjection, Logits, cut
from xtoken_core.losses.masks import SampleTokens, next_token_targets, predicted_ids
from xtoken_core.ops import get_op
from xtoken_core.topk_logits import TopKLogits


class Loss(ABC):
    """One teacher's divergence, with everything static about it (matrices, token maps) prepared once on the device.

    Columns of a batch carry the teacher's number, also where there is only one teacher.

    Attributes:
        parts: Number of tensors that a divergence consists of.
        per_token: True if the divergence is a mean over next tokens, as the cross-entropy is; False: over chunks.
        with_cross_entropy: True if `evaluate` can return the cross-entropy from the same reading of the logits.
        whole_samples: True if the blocks of a student's head must hold whole samples, because a chunk's value reads
            positions beside the chunk's own.
    """

    parts: ClassVar[int] = 1
    per_token: ClassVar[bool] = False
    with_cross_entropy: ClassVar[bool] = False
    whole_samples: ClassVar[bool] = False

    def __init__(
        self, config: LossConfig, teacher: LossTeacher, *, index: int, student_vocab_size: int, device: torch.device
    ) -> None:
        """Store the settings; a subclass builds its static tensors here.

        Args:
            config: The loss's settings.
            teacher: The teacher's static data.
            index: The teacher's number, from 0.
            student_vocab_size: `V_s`.
            device: Device of the logits.
        """
        self.config, self.teacher, self.index = config, teacher, index
        self.name = f"teacher {index}"
        self.student_vocab_size, self.device = student_vocab_size, device

    @classmethod
    def bytes_per_position(cls, student_vocab_size: int, teacher_vocab_size: int) -> int | None:
        """Return the memory that a position takes beside both sides' logits, forward and backward together.

        The estimate of GPU memory adds it for a custom loss, and warns if it is not known.

        Args:
            student_vocab_size: `V_s`.
            teacher_vocab_size: `V_t`.

        Returns:
            Bytes; None: not known.
        """
        return None

    @property
    def vocab_size(self) -> int:
        """Number of leading columns of the teacher's head that are compared."""
        return self.teacher.vocab_size

    @property
    def compares_subset(self) -> bool:
        """True if only some of the teacher's tokens are compared; memory per position is smaller then."""
        return False

    def columns(self, teacher_logits: Logits) -> Int[Tensor, " K"] | None:
        """Return the teacher tokens that are compared; None: the loss makes no choice and takes all.

        Args:
            teacher_logits: `[B, T_t, V_m]`, the teacher's logits of the whole micro-batch, padding included.
        """
        return None

    @abstractmethod
    def pairing(self, batch: Mapping[str, Tensor]) -> Pairing:
        """Return which student positions are compared with which teacher positions."""

    @abstractmethod
    def evaluate(self, inputs: LossInput[Tensor]) -> Divergence:
        """Compute the divergence of every chunk (or position), differentiable by the student's logits."""

    def evaluate_topk(self, inputs: LossInput[TopKLogits]) -> Divergence:
        """Compute `evaluate` from a teacher's largest logits; losses that support it override this.

        Raises:
            ConfigError: This loss reads whole logits.
        """
        raise ConfigError(
            f'{self.name}: {type(self).__name__} reads whole logits: set teacher.content = "hidden" or '
            '"logits", or another loss.mode'
        )

    def compare(self, inputs: LossInput[Any]) -> Divergence:
        """Compute the divergence from whatever form the teacher's logits have."""
        return (self.evaluate_topk if isinstance(inputs.teacher_logits, TopKLogits) else self.evaluate)(inputs)

    @abstractmethod
    def reduce(self, batch: Mapping[str, Tensor], divergence: Divergence, denominator: Scalar | None) -> TeacherTerm:
        """Reduce a divergence to this micro-batch's part of the step's mean, with its metrics.

        Args:
            batch: A padded or packed micro-batch.
            divergence: The result of `evaluate` over the whole micro-batch.
            denominator: The step's number of valid chunks (tokens if `per_token`); None: this micro-batch's.
        """

    @abstractmethod
    def count(self, batch: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """Count a micro-batch's valid chunks or tokens: its part of the step's denominator."""

    def chunks(self, batch: Mapping[str, Tensor]) -> ChunkView | None:
        """Return the teacher's alignment at predicting positions; None if the loss has no chunks."""
        return None

    def tokens(self, batch: Mapping[str, Tensor]) -> SampleTokens:
        """Return the tokens that the teacher has read."""
        fields = (schema.TEACHER_INPUT_IDS, schema.TEACHER_TOKEN_MASK, schema.TEACHER_SAMPLE)
        ids, mask, sample = (schema.field_name(field, self.index) for field in fields)
        return SampleTokens(batch[ids], batch[mask], batch[schema.SAMPLE_MASK.name], batch.get(sample))

    def check_head(self, teacher_logits: Logits) -> None:
        """Refuse a head narrower than the vocabulary.

        Raises:
            InputError: The head, or its column maxima, have fewer columns than the vocabulary has tokens.
        """
        if teacher_logits.shape[-1] < self.vocab_size:
            raise InputError(
                f"{self.name}: its head gives {teacher_logits.shape[-1]} logits, its tokenizer has "
                f"{self.vocab_size} tokens: this model and tokenizer do not belong together"
            )
        maxima = teacher_logits.column_maxima if isinstance(teacher_logits, HeadProjection) else None
        if maxima is not None and maxima.shape[-1] < self.vocab_size:
            raise InputError(
                f"{self.name}: column maxima of {maxima.shape[-1]} tokens were given, its tokenizer has "
                f"{self.vocab_size}"
            )

    def top_columns(self, teacher_logits: Logits, k: int | None) -> Int[Tensor, " K"]:
        """Return the `k` tokens with the largest maximum logit over all positions of the micro-batch.

        Args:
            teacher_logits: `[B, T_t, V_m]`.
            k: Number of tokens; None, or more than the vocabulary has: all of them.
        """
        size = self.vocab_size
        k = size if k is None else min(k, size)
        # By each column's maximum over the micro-batch; K is static, so that nothing waits for the device.
        select = get_op("select_topk_columns", teacher_logits.device)
        if isinstance(teacher_logits, Tensor):
            ids: Tensor = select(cut(teacher_logits, size), k)
        elif k < size:
            if isinstance(teacher_logits, TopKLogits):
                maximum = teacher_logits.column_maximum().view(1, 1, size)
            else:
                maximum = teacher_logits.column_maximum(size)
            ids = select(maximum, k)
        else:  # no reason to multiply the head out
            ids = torch.arange(size, device=teacher_logits.device)
        return ids


class ChunkLoss(Loss):
    """A loss between models with different tokenizers: one value per aligned chunk, averaged over valid chunks.

    Attributes:
        mode: Its name in the settings.
        count_name: Metric that holds the micro-batch's valid chunks.
        part_names: Metrics that hold the mean of each part, without `T^2`; empty: they are not reported.
        reads_teacher_targets: True if `Pairing.teacher_targets` is needed.
        accuracy_counts_masked: True if `proj_accuracy` counts chunks of masked samples too.
    """

    mode: ClassVar[LossMode]
    count_name: ClassVar[str] = "num_valid_chunks"
    part_names: ClassVar[tuple[str, ...]] = ()
    reads_teacher_targets: ClassVar[bool] = False
    accuracy_counts_masked: ClassVar[bool] = False

    @property
    def scale(self) -> float:
        """Factor of the mean divergence: `T^2`, which keeps gradients independent of the temperature."""
        return self.config.temperature**2

    def chunks(self, batch: Mapping[str, Tensor]) -> ChunkView:
        """Return the teacher's alignment at predicting positions."""
        return ChunkView.of(batch, self.index, self.config, self.mode)

    def view(self, batch: Mapping[str, Tensor]) -> ChunkView:
        """Return `chunks`, computed once for a `NumberedBatch`."""
        if not isinstance(batch, NumberedBatch):
            return self.chunks(batch)
        # Columns, pairing, denominators and reduction all ask for it.
        if self.index not in batch.views:
            batch.views[self.index] = self.chunks(batch)
        return batch.views[self.index]

    def pairing(self, batch: Mapping[str, Tensor]) -> Pairing:
        """Return the chunk of every position on both sides."""
        chunks = self.view(batch)
        targets = predicted_ids(self.tokens(batch).ids) if self.reads_teacher_targets else None
        return Pairing(
            next_token_targets(batch), targets, chunks.student_chunk_id, chunks.teacher_chunk_id, chunks.max_chunks
        )

    def count(self, batch: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """Return the micro-batch's number of valid chunks, float32."""
        return self.view(batch).valid.sum().float()

    def reduce(self, batch: Mapping[str, Tensor], divergence: Divergence, denominator: Scalar | None) -> TeacherTerm:
        """Reduce to the mean over valid chunks, times `scale`.

        `proj_accuracy` is divided by a given denominator, so that the micro-batches of a step add up; without one by
        the chunks that it counts.

        Args:
            batch: A padded or packed micro-batch.
            divergence: `[B, P]` parts.
            denominator: The step's number of valid chunks; None: this micro-batch's.
        """
        chunks = self.view(batch)
        count = chunks.valid.sum().float()
        step = count if denominator is None else denominator
        # Masked before the sum: chunks that do not count may hold NaN, and 0 * NaN is NaN.
        means = [partial_mean(masked_sum(part, chunks.valid), step) for part in divergence.parts]
        metrics = {self.count_name: count}
        metrics |= {name: mean.detach() for name, mean in zip(self.part_names, means, strict=False)}
        if divergence.agrees is not None:
            counted = chunks.comparable if self.accuracy_counts_masked else chunks.valid
            hits = (divergence.agrees & counted).sum().float()
            metrics["proj_accuracy"] = partial_mean(hits, counted.sum().float() if denominator is None else denominator)
        if divergence.mass is not None:
            metrics["chunk_mass"] = partial_mean(masked_sum(divergence.mass, chunks.valid), step)
        if divergence.unreachable is not None:
            metrics["unreachable_mass"] = partial_mean(masked_sum(divergence.unreachable, chunks.valid), step)
        return TeacherTerm(sum(means[1:], start=means[0]) * self.scale, count, metrics)
