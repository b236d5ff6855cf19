"""P-KL: the student's distribution projected onto the teacher's vocabulary, compared chunk by chunk."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from xtoken_core.config.loss import LossConfig
from xtoken_core.losses.common import ChunkView, Scalar, TeacherTerm, chunk_shares, masked_sum, share
from xtoken_core.ops import get_op
from xtoken_core.ops.p_kl import PKLOptions, PKLResult
from xtoken_core.ops.sparse_projection import ProjectionMatrix


def p_kl_loss(
    student_logits: Float[Tensor, "B T_s V_s"],
    teacher_logits: Float[Tensor, "B T_t V_t"],
    chunks: ChunkView,
    projection: ProjectionMatrix,
    config: LossConfig,
    denominator: Scalar | None,
) -> TeacherTerm:
    """P-KL over the teacher tokens with the largest logits of the micro-batch, padding included.

    Args:
        student_logits: Cut to the student's vocabulary.
        teacher_logits: Cut to the teacher's vocabulary.
        chunks: The alignment at predicting positions.
        projection: `W [V_s, V_t]`.
        config: The loss's settings.
        denominator: The step's valid chunks; None: this micro-batch's.
    """
    device = student_logits.device
    k = config.vocab_topk or teacher_logits.shape[-1]
    columns = get_op("select_topk_columns", device)(teacher_logits, k)
    result: PKLResult = get_op("p_kl", device)(
        student_logits,
        teacher_logits,
        projection,
        columns,
        chunks.student_chunk_id,
        chunks.teacher_chunk_id,
        PKLOptions(chunks.max_chunks, config.temperature, config.reverse_kl, config.teacher_chunk_average),
    )
    in_force, count, metrics = chunk_shares(chunks, denominator, agrees=result.agrees, mass=result.mass)
    kd = share(masked_sum(result.kl, chunks.valid), in_force) * config.temperature**2
    metrics["num_valid_pairs"] = count
    return TeacherTerm(kd, count, metrics)
