"""P-KL: the student's distribution projected onto the teacher's vocabulary, compared chunk by chunk."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.config.loss import LossConfig
from xtoken_core.losses.common import (
    ChunkView,
    Divergence,
    Pairing,
    Scalar,
    TeacherTerm,
    chunk_shares,
    cut,
    masked_sum,
    share,
)
from xtoken_core.ops import get_op
from xtoken_core.ops.p_kl import PKLCrossEntropyResult, PKLOptions, PKLResult
from xtoken_core.ops.sparse_projection import ProjectionMatrix


def p_kl_divergence(
    student_logits: Float[Tensor, "B T_s V_head"],
    teacher_logits: Float[Tensor, "B T_t V_t"],
    pairing: Pairing,
    projection: ProjectionMatrix,
    columns: Int[Tensor, " K"],
    config: LossConfig,
    *,
    gathered: bool = False,
    overwrite: bool = False,
    with_tokens: bool = False,
) -> Divergence:
    """P-KL of every chunk over the compared teacher tokens.

    Args:
        student_logits: The whole head; the divergence is over the projection's rows.
        teacher_logits: Cut to the teacher's vocabulary.
        pairing: The chunks.
        projection: `W [V_s, V_t]`.
        columns: The compared teacher tokens.
        config: The loss's settings.
        gathered: Whether the teacher's logits are those of `columns` alone.
        overwrite: Whether the student's logits may be lost to their gradient.
        with_tokens: Whether the cross-entropy comes with it: one reading of the student's rows serves both, and one
            gradient.
    """
    compared = teacher_logits, projection, columns, *pairing.chunk_ids
    overwrite = overwrite or (with_tokens and config.gradient_in_place)
    options = PKLOptions(
        pairing.max_chunks, config.temperature, config.reverse_kl, config.teacher_chunk_average, gathered, overwrite
    )
    if not with_tokens:
        student = cut(student_logits, projection.student_vocab_size)
        result: PKLResult = get_op("p_kl", student.device)(student, *compared, options)
        return Divergence((result.kl,), result.agrees, result.mass)
    op = get_op("p_kl_cross_entropy", student_logits.device)
    both: PKLCrossEntropyResult = op(student_logits, *compared, pairing.student_targets, options)
    return Divergence((both.kl,), both.agrees, both.mass, (both.losses, both.hits))


def p_kl_term(divergence: Divergence, chunks: ChunkView, config: LossConfig, denominator: Scalar | None) -> TeacherTerm:
    """The mean over valid chunks, times `T^2`.

    Args:
        divergence: Of every chunk.
        chunks: The alignment at predicting positions.
        config: The loss's settings.
        denominator: The step's valid chunks; None: this micro-batch's.
    """
    in_force, count, metrics = chunk_shares(chunks, denominator, agrees=divergence.agrees, mass=divergence.mass)
    kd = share(masked_sum(divergence.parts[0], chunks.valid), in_force) * config.temperature**2
    metrics["num_valid_pairs"] = count
    return TeacherTerm(kd, count, metrics)
