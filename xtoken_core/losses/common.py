"""What every loss shares: a teacher's static data, its part of a batch, and how a mean is taken over a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from xtoken_core import schema
from xtoken_core.losses.masks import comparable_chunks, shifted_chunk_ids

Scalar = int | float | Tensor
"""A denominator: a number, or a tensor without dimensions on the logits' device."""

CE_EPSILON = 1e-8
"""Added to the number of next-token predictions, as the method's reference does."""


@dataclass(frozen=True)
class LossTeacher:
    """What the loss knows about a teacher before any batch.

    Attributes:
        vocab_size: Its tokenizer's size; a wider head is cut to it.
        indices: `[V_s, k]` int64 teacher ids of each student token, -1 = empty slot; None: the student's tokenizer.
        likelihoods: `[V_s, k]` their weights; None likewise.
        weight: Its static share in the sum over teachers.
    """

    vocab_size: int
    indices: Tensor | None = None
    likelihoods: Tensor | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if (self.indices is None) != (self.likelihoods is None):
            raise ValueError("a teacher's projection needs both indices and likelihoods, or neither")

    @property
    def same_tokenizer(self) -> bool:
        """Whether it shares the student's tokenizer: then it has no projection."""
        return self.indices is None


@dataclass(frozen=True)
class ChunkView:
    """A teacher's alignment in a padded batch, moved to the predicting positions.

    Attributes:
        student_chunk_id: Chunk of each student position, -1 = none.
        teacher_chunk_id: Chunk of each teacher position, -1 = none.
        comparable: Chunks that could be compared, whatever the sample mask says.
        valid: Those of them in unmasked samples.
    """

    student_chunk_id: Int[Tensor, "B T_s"]
    teacher_chunk_id: Int[Tensor, "B T_t"]
    comparable: Bool[Tensor, "B P"]
    valid: Bool[Tensor, "B P"]

    @property
    def max_chunks(self) -> int:
        """`P`."""
        return self.valid.shape[1]

    @classmethod
    def of(cls, batch: Mapping[str, Tensor], teacher: int | None, *, exact_only: bool) -> ChunkView:
        """Read one teacher's columns.

        Args:
            batch: A padded batch.
            teacher: The index its columns carry; None if it is the only one.
            exact_only: Leave out pairs whose sides spell different bytes.
        """
        student = shifted_chunk_ids(batch[schema.field_name(schema.STUDENT_CHUNK_ID, teacher)])
        of_teacher = shifted_chunk_ids(batch[schema.field_name(schema.TEACHER_CHUNK_ID, teacher)])
        comparable = comparable_chunks(
            student,
            of_teacher,
            batch[schema.field_name(schema.PAIR_VALID, teacher)],
            batch[schema.field_name(schema.PAIR_IS_CORRECT, teacher)],
            exact_only=exact_only,
        )
        unmasked = batch[schema.SAMPLE_MASK.name] > 0
        return cls(student, of_teacher, comparable, comparable & unmasked.unsqueeze(1))


@dataclass(frozen=True)
class Pairing:
    """Which positions of a student and a teacher belong together, and what each of them predicts.

    Attributes:
        student_targets: The id that each student position predicts; any id where it predicts none.
        teacher_targets: Likewise; None where the mode does not read them.
        student_chunk_id: Chunk of each student position, -1 = none; None with the student's tokenizer.
        teacher_chunk_id: Likewise.
        max_chunks: `P`.
    """

    student_targets: Int[Tensor, "B T_s"]
    teacher_targets: Int[Tensor, "B T_t"] | None = None
    student_chunk_id: Int[Tensor, "B T_s"] | None = None
    teacher_chunk_id: Int[Tensor, "B T_t"] | None = None
    max_chunks: int = 0

    @property
    def chunk_ids(self) -> tuple[Int[Tensor, "B T_s"], Int[Tensor, "B T_t"]]:
        """Both sides' chunks, where the tokenizers differ."""
        if self.student_chunk_id is None or self.teacher_chunk_id is None:
            raise ValueError("a teacher with the student's tokenizer has no chunks")
        return self.student_chunk_id, self.teacher_chunk_id


class Divergence(NamedTuple):
    """How far a student is from a teacher, per chunk (`[B, P]`) or, with one tokenizer, per position (`[B, T_s]`).

    Attributes:
        parts: What is added up, in nats, without the factor `T^2`; with gradients.
        agrees: Whether both sides' first guess is the same, where the mode has one.
        mass: The teacher's mass, where the mode has one.
        tokens: The student's cross-entropy and hits at every position, where they came with it.
    """

    parts: tuple[Tensor, ...]
    agrees: Tensor | None = None
    mass: Tensor | None = None
    tokens: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class TeacherTerm:
    """One teacher's part of the loss.

    Attributes:
        kd: The divergence including `T^2`, divided by the step's denominator.
        count: What this micro-batch adds to that denominator.
        metrics: Detached parts by name, without the teacher's suffix.
    """

    kd: Float[Tensor, ""]
    count: Float[Tensor, ""]
    metrics: dict[str, Float[Tensor, ""]]


def masked_sum(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """The sum of the values where the mask is True; what stands elsewhere (NaN, inf) has no effect."""
    return values.masked_fill(~mask, 0.0).sum()


def share(total: Float[Tensor, ""], denominator: Scalar) -> Float[Tensor, ""]:
    """`total` over the step's denominator; a denominator of 0 (nothing valid) gives 0."""
    if isinstance(denominator, Tensor):
        return total / denominator.to(total.dtype).clamp(min=1.0)
    return total / max(float(denominator), 1.0)


def chunk_shares(
    chunks: ChunkView,
    denominator: Scalar | None,
    *,
    agrees: Bool[Tensor, "B P"] | None = None,
    mass: Float[Tensor, "B P"] | None = None,
) -> tuple[Scalar, Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """The denominator in force, this micro-batch's share of it, and the metrics every chunk loss reports.

    `proj_accuracy` counts masked samples too, over all comparable chunks of the micro-batch, as the method's
    reference does; against a given denominator it is divided by that, so that a step's shares add up.
    """
    count = chunks.valid.sum().float()
    metrics = {}
    if agrees is not None:
        hits, compared = (agrees & chunks.comparable).sum().float(), chunks.comparable.sum().float()
        metrics["proj_accuracy"] = share(hits, compared if denominator is None else denominator)
    in_force = count if denominator is None else denominator
    if mass is not None:
        metrics["chunk_mass"] = share(masked_sum(mass, chunks.valid), in_force)
    return in_force, count, metrics


def cut(logits: Float[Tensor, "B T V"], vocab_size: int) -> Float[Tensor, "B T W"]:
    """The first `vocab_size` columns, as a view; a narrower head stays as it is."""
    return logits if logits.shape[-1] <= vocab_size else logits[..., :vocab_size]


def detached(value: Scalar, like: Tensor) -> Tensor:
    """A metric as a detached float32 tensor on the device of `like`, without a host synchronisation."""
    if isinstance(value, Tensor):
        return value.detach().float()
    return torch.full((), value, dtype=torch.float32, device=like.device)
