"""P-KL: the student's distribution projected onto the teacher's vocabulary, compared chunk by chunk."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.config.loss import LossConfig
from xtoken_core.losses.common import ChunkView, Scalar, TeacherTerm, chunk_shares, cut, masked_sum, share
from xtoken_core.ops import get_op
from xtoken_core.ops.p_kl import PKLCrossEntropyResult, PKLOptions, PKLResult
from xtoken_core.ops.sparse_projection import ProjectionMatrix


def p_kl_loss(
    student_logits: Float[Tensor, "B T_s V_head"],
    teacher_logits: Float[Tensor, "B T_t V_t"],
    chunks: ChunkView,
    projection: ProjectionMatrix,
    config: LossConfig,
    denominator: Scalar | None,
    *,
    targets: Int[Tensor, "B T_s"] | None = None,
) -> TeacherTerm:
    """P-KL over the teacher tokens with the largest logits of the micro-batch, padding included.

    Args:
        student_logits: The whole head; the divergence is over the projection's rows.
        teacher_logits: Cut to the teacher's vocabulary.
        chunks: The alignment at predicting positions.
        projection: `W [V_s, V_t]`.
        config: The loss's settings.
        denominator: The step's valid chunks; None: this micro-batch's.
        targets: With the ids that the positions predict the term also holds the cross-entropy: one reading of the
            student's rows serves both, and one gradient.
    """
    device = student_logits.device
    columns = get_op("select_topk_columns", device)(teacher_logits, config.vocab_topk or teacher_logits.shape[-1])
    compared = teacher_logits, projection, columns, chunks.student_chunk_id, chunks.teacher_chunk_id
    options = PKLOptions(chunks.max_chunks, config.temperature, config.reverse_kl, config.teacher_chunk_average)
    tokens = None
    if targets is None:
        student = cut(student_logits, projection.student_vocab_size)
        result: PKLResult | PKLCrossEntropyResult = get_op("p_kl", device)(student, *compared, options)
    else:
        both: PKLCrossEntropyResult = get_op("p_kl_cross_entropy", device)(student_logits, *compared, targets, options)
        result, tokens = both, (both.losses, both.hits)
    in_force, count, metrics = chunk_shares(chunks, denominator, agrees=result.agrees, mass=result.mass)
    kd = share(masked_sum(result.kl, chunks.valid), in_force) * config.temperature**2
    metrics["num_valid_pairs"] = count
    return TeacherTerm(kd, count, metrics, tokens)
