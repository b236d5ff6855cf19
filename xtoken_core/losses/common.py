"""Types and helpers that every loss shares: a teacher's static data, its columns of a batch, means over a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from xtoken_core import schema
from xtoken_core.chain.tables import ChainTables
from xtoken_core.config.loss import LossConfig, LossMode
from xtoken_core.errors import ConfigError
from xtoken_core.losses.masks import COMPARED_FIELDS, compared_chunks, of_samples, shifted_chunk_ids
from xtoken_core.topk_logits import TopKLogits

Scalar = int | float | Tensor
"""A denominator: a number, or a tensor without dimensions on the logits' device."""

CE_EPSILON = 1e-8
"""Added to the number of next-token predictions, as the method's reference does."""


@dataclass(frozen=True)
class LossTeacher:
    """A teacher's static data. Without projection, tables and `own_tokenizer` it has the student's tokenizer.

    Attributes:
        vocab_size: Size of its tokenizer; a wider head is cut to it.
        indices: `[V_s, k]` int64 teacher ids of each student token, -1 = empty slot: the dense top-k projection.
        likelihoods: `[V_s, k]` floating weights of these.
        weight: Static weight in the sum over teachers.
        matrix: `[V_s, V_t]` sparse COO weights, for a projection without rows of weights; instead of the two above.
        tables: Chain tables of the student's and this teacher's tokenizer.
        own_tokenizer: Its tokenizer is not the student's, and its loss reads no projection (ULD, ALM).
        tokenizers: Loads the student's and this teacher's tokenizer, for a custom loss; None for the library's losses.
    """

    vocab_size: int
    indices: Tensor | None = None
    likelihoods: Tensor | None = None
    weight: float = 1.0
    matrix: Tensor | None = None
    tables: ChainTables | None = None
    own_tokenizer: bool = False
    tokenizers: Callable[[], tuple[Any, Any]] | None = None

    def __post_init__(self) -> None:
        if (self.indices is None) != (self.likelihoods is None):
            raise ValueError("a teacher's projection needs both indices and likelihoods, or neither")
        if self.indices is not None and self.matrix is not None:
            raise ValueError("a teacher's projection is either dense top-k or a sparse matrix, not both")

    @property
    def same_tokenizer(self) -> bool:
        """True if it has the student's tokenizer."""
        return not self.own_tokenizer and self.indices is None and self.matrix is None and self.tables is None

    def rows(self) -> tuple[Int[Tensor, "rows k"], Float[Tensor, "rows k"]]:
        """Return the dense top-k projection.

        Raises:
            ConfigError: The projection is sparse.
        """
        if self.indices is None or self.likelihoods is None:
            raise ConfigError("this loss takes a dense top-k projection (xtoken projection build)")
        return self.indices, self.likelihoods


@dataclass(frozen=True)
class ChunkView:
    """A teacher's alignment in a batch, moved to the predicting positions.

    Attributes:
        student_chunk_id: int64 chunk of each student position, -1 = none.
        teacher_chunk_id: int64 chunk of each teacher position, -1 = none.
        comparable: True for chunks with positions on both sides, masked samples included.
        valid: True for those of them in unmasked samples.
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
    def of(cls, batch: Mapping[str, Tensor], teacher: int, config: LossConfig, mode: LossMode) -> ChunkView:
        """Read one teacher's columns.

        Args:
            batch: A padded or packed batch.
            teacher: The teacher's number.
            config: The run's loss settings.
            mode: The teacher's mode, which decides the chunks that are compared.
        """
        student, of_teacher, *pairs = (batch[schema.field_name(field, teacher)] for field in COMPARED_FIELDS)
        samples = (batch.get(schema.STUDENT_SAMPLE.name), batch.get(schema.field_name(schema.TEACHER_SAMPLE, teacher)))
        # By the unshifted alignment: the rules of some modes ask for the tokens themselves.
        comparable = compared_chunks(student, of_teacher, pairs[0], pairs[1], config, mode, samples=samples)
        unmasked = of_samples(
            batch[schema.SAMPLE_MASK.name] > 0, batch.get(schema.field_name(schema.PAIR_SAMPLE, teacher))
        )
        # Positions predict the next token, so a chunk's losses stand one position before its tokens.
        shifted = shifted_chunk_ids(student, samples[0]), shifted_chunk_ids(of_teacher, samples[1])
        valid = comparable & unmasked
        if not valid.shape[1]:  # no sample has a chunk: operators take at least one, which has no positions here
            comparable = valid = valid.new_zeros(len(valid), 1)
        return cls(*shifted, comparable, valid)


class NumberedBatch(dict[str, Tensor]):
    """A micro-batch whose teacher columns carry their teacher's number, with what losses derive from it once.

    Attributes:
        views: The alignments at predicting positions, by teacher.
    """

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        """Copy the columns, not their values."""
        super().__init__(schema.with_numbers(batch))
        self.views: dict[int, ChunkView] = {}


class ReadTokens(NamedTuple):
    """The token that each position has read last, and its chunk, on both sides.

    Attributes:
        student_ids: The student's tokens.
        teacher_ids: The teacher's tokens.
        student_chunk_id: Chunk of each of the student's within its sample, -1 = none.
        teacher_chunk_id: Likewise of the teacher's.
        generated: True where the text is the student's own; None: the loss compares both kinds alike.
    """

    student_ids: Int[Tensor, "B T_s"]
    teacher_ids: Int[Tensor, "B T_t"]
    student_chunk_id: Int[Tensor, "B T_s"]
    teacher_chunk_id: Int[Tensor, "B T_t"]
    generated: Bool[Tensor, "B T_s"] | None = None


@dataclass(frozen=True)
class Pairing:
    """The correspondence of a student's and a teacher's positions, and what each of them predicts.

    Attributes:
        student_targets: The id that each student position predicts; any id where it predicts none.
        teacher_targets: Likewise; None where the mode does not read them.
        student_chunk_id: Chunk of each student position, -1 = none; None with the student's tokenizer.
        teacher_chunk_id: Likewise.
        max_chunks: `P`.
        read: The tokens that positions have read; None where the mode does not need them.
    """

    student_targets: Int[Tensor, "B T_s"]
    teacher_targets: Int[Tensor, "B T_t"] | None = None
    student_chunk_id: Int[Tensor, "B T_s"] | None = None
    teacher_chunk_id: Int[Tensor, "B T_t"] | None = None
    max_chunks: int = 0
    read: ReadTokens | None = None

    @property
    def chunk_ids(self) -> tuple[Int[Tensor, "B T_s"], Int[Tensor, "B T_t"]]:
        """The student's and the teacher's `chunk_id`.

        Raises:
            ValueError: The teacher has the student's tokenizer, so there are no chunks.
        """
        if self.student_chunk_id is None or self.teacher_chunk_id is None:
            raise ValueError("a teacher with the student's tokenizer has no chunks")
        return self.student_chunk_id, self.teacher_chunk_id


TeacherForm = TypeVar("TeacherForm", bound=Float[Tensor, "B T_t W"] | TopKLogits)
"""The form of a teacher's logits: whole, or the largest ones of each position."""


@dataclass(frozen=True)
class LossInput(Generic[TeacherForm]):
    """The argument of a loss: both sides' logits of a micro-batch, and which of their positions belong together.

    Where the student's head is multiplied block by block it is a block: `B` is 1, and chunks have the block's numbers.

    Attributes:
        pairing: The chunks, and the tokens that positions predict.
        student_logits: The uncut head, any floating dtype; with gradients.
        teacher_logits: Likewise, without gradients; the largest ones of each position for `evaluate_topk`.
        columns: int64 result of `Loss.columns`; None: all tokens are compared.
        gathered: True if `teacher_logits` are those of `columns` only (`W = K`).
        overwrite: True if the student's logits may be overwritten by their gradient.
        with_tokens: True if the student's cross-entropy is to be returned too (losses `with_cross_entropy` only).
    """

    pairing: Pairing
    student_logits: Float[Tensor, "B T_s V_head"]
    teacher_logits: TeacherForm
    columns: Int[Tensor, " K"] | None = None
    gathered: bool = False
    overwrite: bool = False
    with_tokens: bool = False


class Divergence(NamedTuple):
    """The divergence of every chunk (`[B, P]`) or, with one tokenizer, of every position (`[B, T_s]`).

    Attributes:
        parts: Summands, in nats, without the factor `T^2`; with gradients.
        agrees: bool, True if both sides' first guess is the same; None: the loss has no guess.
        mass: The teacher's probability mass; None: the loss does not report it.
        tokens: The student's cross-entropy (nats) and hits (bool), `[B, T_s]` each; None unless asked for.
        unreachable: The teacher's mass on tokens that the student cannot reach, `[B, P]`; None: it can reach all.
    """

    parts: tuple[Tensor, ...]
    agrees: Tensor | None = None
    mass: Tensor | None = None
    tokens: tuple[Tensor, Tensor] | None = None
    unreachable: Tensor | None = None


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
    """Return the sum of the values where the mask is True; NaN and inf elsewhere have no effect."""
    return values.masked_fill(~mask, 0.0).sum()


def partial_mean(total: Float[Tensor, ""], denominator: Scalar) -> Float[Tensor, ""]:
    """Return `total` over the step's denominator; a denominator of 0 (nothing valid) gives 0.

    Args:
        total: A sum over this micro-batch.
        denominator: The step's count.
    """
    if isinstance(denominator, Tensor):
        # At least 1: a rank may have no valid chunk in a step, and its part of the mean is then 0, not NaN.
        return total / denominator.to(total.dtype).clamp(min=1.0)
    return total / max(float(denominator), 1.0)


def detached(value: Scalar, like: Tensor) -> Tensor:
    """Return a metric as a detached float32 tensor on the device of `like`, without a host synchronisation."""
    if isinstance(value, Tensor):
        return value.detach().float()
    # `torch.full` fills on the device; `torch.tensor` would copy from the host and wait.
    return torch.full((), value, dtype=torch.float32, device=like.device)
