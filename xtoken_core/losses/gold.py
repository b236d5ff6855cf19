"""gold, H-KL and ULD: KL over common tokens, sorted L1 over the rest; they differ in what counts as common."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from xtoken_core.config.loss import LossConfig
from xtoken_core.losses.common import ChunkView, Scalar, TeacherTerm, chunk_shares, masked_sum, share
from xtoken_core.ops import get_op
from xtoken_core.ops.gold import GoldOptions, GoldResult, TokenPartition


def gold_loss(
    student_logits: Float[Tensor, "B T_s V_s"],
    teacher_logits: Float[Tensor, "B T_t V_t"],
    chunks: ChunkView,
    partition: TokenPartition,
    config: LossConfig,
    denominator: Scalar | None,
    *,
    uncommon_topk: int | None,
) -> TeacherTerm:
    """Common KL plus uncommon L1, averaged over the valid chunks.

    Args:
        student_logits: Cut to the student's vocabulary.
        teacher_logits: Cut to the teacher's vocabulary.
        chunks: The alignment at predicting positions.
        partition: Common pairs and the rest; strict for gold, relaxed for H-KL, without common pairs for ULD.
        config: The loss's settings.
        denominator: The step's valid chunks; None: this micro-batch's.
        uncommon_topk: Where the sorted lists are cut; None: nowhere (ULD).
    """
    result: GoldResult = get_op("gold", student_logits.device)(
        student_logits,
        teacher_logits,
        partition,
        chunks.student_chunk_id,
        chunks.teacher_chunk_id,
        GoldOptions(chunks.max_chunks, config.temperature, config.reverse_kl, uncommon_topk),
    )
    in_force, count, metrics = chunk_shares(chunks, denominator, agrees=result.agrees, mass=result.mass)
    common = share(masked_sum(result.kl_common, chunks.valid), in_force)
    uncommon = share(masked_sum(result.l1_uncommon, chunks.valid), in_force)
    metrics |= {"kl_common": common.detach(), "l1_uncommon": uncommon.detach(), "num_valid_chunks": count}
    return TeacherTerm((common + uncommon) * config.temperature**2, count, metrics)
