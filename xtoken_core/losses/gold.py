"""gold, H-KL and ULD: KL over common tokens, sorted L1 over the rest; they differ in what counts as common."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from xtoken_core.config.loss import LossConfig
from xtoken_core.losses.common import (
    ChunkView,
    Divergence,
    Pairing,
    Scalar,
    TeacherTerm,
    chunk_shares,
    masked_sum,
    share,
)
from xtoken_core.ops import get_op
from xtoken_core.ops.gold import GoldOptions, GoldResult, TokenPartition


def gold_divergence(
    student_logits: Float[Tensor, "B T_s V_s"],
    teacher_logits: Float[Tensor, "B T_t V_t"],
    pairing: Pairing,
    partition: TokenPartition,
    config: LossConfig,
    *,
    uncommon_topk: int | None,
) -> Divergence:
    """Common KL and uncommon L1 of every chunk.

    Args:
        student_logits: Cut to the student's vocabulary.
        teacher_logits: Cut to the teacher's vocabulary.
        pairing: The chunks.
        partition: Common pairs and the rest; strict for gold, relaxed for H-KL, without common pairs for ULD.
        config: The loss's settings.
        uncommon_topk: Where the sorted lists are cut; None: nowhere (ULD).
    """
    options = GoldOptions(pairing.max_chunks, config.temperature, config.reverse_kl, uncommon_topk)
    op = get_op("gold", student_logits.device)
    result: GoldResult = op(student_logits, teacher_logits, partition, *pairing.chunk_ids, options)
    return Divergence((result.kl_common, result.l1_uncommon), result.agrees, result.mass)


def gold_term(divergence: Divergence, chunks: ChunkView, config: LossConfig, denominator: Scalar | None) -> TeacherTerm:
    """The mean of both parts over the valid chunks, times `T^2`.

    Args:
        divergence: Of every chunk.
        chunks: The alignment at predicting positions.
        config: The loss's settings.
        denominator: The step's valid chunks; None: this micro-batch's.
    """
    in_force, count, metrics = chunk_shares(chunks, denominator, agrees=divergence.agrees, mass=divergence.mass)
    common, uncommon = (share(masked_sum(part, chunks.valid), in_force) for part in divergence.parts)
    metrics |= {"kl_common": common.detach(), "l1_uncommon": uncommon.detach(), "num_valid_chunks": count}
    return TeacherTerm((common + uncommon) * config.temperature**2, count, metrics)
