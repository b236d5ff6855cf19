"""ALM: the likelihoods that both models give to a chunk's own tokens, compared as two coins."""

from __future__ import annotations

import torch
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
    masked_sum,
    share,
)
from xtoken_core.ops import get_op
from xtoken_core.ops.numerics import EPSILON, kl_terms


def alm_divergence(
    student_logits: Float[Tensor, "B T_s V_s"],
    teacher_logits: Float[Tensor, "B T_t V_t"],
    pairing: Pairing,
    config: LossConfig,
) -> Divergence:
    """Approximate likelihood matching: the Bernoulli KL of every chunk.

    `p` is the product of a side's probabilities of the chunk's own tokens, at temperature 1; the coins are
    `p_t^(1/tau)` and `p_s^(1/tau)`, with `tau = config.alm_temperature`. Logarithms are kept below `-1e-10`, so that
    a side that is certain leaves the other a finite cost.

    Args:
        student_logits: Cut to the student's vocabulary.
        teacher_logits: Cut to the teacher's vocabulary.
        pairing: The chunks, and the tokens that positions predict.
        config: The loss's settings.
    """
    tau, P = config.alm_temperature, pairing.max_chunks
    of_student, of_teacher = pairing.chunk_ids
    if pairing.teacher_targets is None:
        raise ValueError("ALM needs the tokens that the teacher's positions predict")
    log_b = _chunk_log_likelihood(student_logits, pairing.student_targets, of_student, P) / tau
    log_a = _chunk_log_likelihood(teacher_logits, pairing.teacher_targets, of_teacher, P) / tau
    return Divergence((bernoulli_kl(log_b, log_a) if config.reverse_kl else bernoulli_kl(log_a, log_b),))


def alm_term(divergence: Divergence, chunks: ChunkView, denominator: Scalar | None) -> TeacherTerm:
    """The mean over valid chunks.

    Args:
        divergence: Of every chunk.
        chunks: The alignment at predicting positions.
        denominator: The step's valid chunks; None: this micro-batch's.
    """
    in_force, count, metrics = chunk_shares(chunks, denominator)
    metrics["num_valid_chunks"] = count
    return TeacherTerm(share(masked_sum(divergence.parts[0], chunks.valid), in_force), count, metrics)


def bernoulli_kl(log_a: Float[Tensor, "*shape"], log_b: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """`KL(Bernoulli(a) || Bernoulli(b))` in nats, from log-probabilities kept below `-1e-10`; `0 * -inf = 0`."""
    log_a, log_b = log_a.clamp(max=-EPSILON), log_b.clamp(max=-EPSILON)
    tails_a, tails_b = (torch.log(-torch.expm1(heads)) for heads in (log_a, log_b))
    return kl_terms(log_a, log_b) + kl_terms(tails_a, tails_b)


def _chunk_log_likelihood(
    logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"], chunk_id: Int[Tensor, "B T"], max_chunks: int
) -> Float[Tensor, "B P"]:
    nll, _ = get_op("cross_entropy", logits.device)(logits, targets)
    means, sizes = get_op("chunk_mean", logits.device)(nll.unsqueeze(-1), chunk_id, max_chunks)
    total: Tensor = means.squeeze(-1) * (sizes + EPSILON)
    return -total
