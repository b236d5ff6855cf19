"""ALM: the likelihoods that both models give to a chunk's own tokens, compared as two coins."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.config.loss import LossConfig
from xtoken_core.losses.common import ChunkView, Scalar, TeacherTerm, chunk_shares, masked_sum, share
from xtoken_core.ops import get_op
from xtoken_core.ops.numerics import EPSILON


def alm_loss(
    student_logits: Float[Tensor, "B T_s V_s"],
    teacher_logits: Float[Tensor, "B T_t V_t"],
    student_ids: Int[Tensor, "B T_s"],
    teacher_ids: Int[Tensor, "B T_t"],
    chunks: ChunkView,
    config: LossConfig,
    denominator: Scalar | None,
) -> TeacherTerm:
    """Approximate likelihood matching: mean over valid chunks of a Bernoulli KL.

    `p` is the product of a side's probabilities of the chunk's own tokens, at temperature 1; the coins are
    `p_t^(1/tau)` and `p_s^(1/tau)`, with `tau = config.alm_temperature`. Logarithms are kept below `-1e-10`, so that
    a side that is certain leaves the other a finite cost.

    Args:
        student_logits: Cut to the student's vocabulary.
        teacher_logits: Cut to the teacher's vocabulary.
        student_ids: The student's own tokens.
        teacher_ids: The teacher's.
        chunks: The alignment at predicting positions.
        config: The loss's settings.
        denominator: The step's valid chunks; None: this micro-batch's.
    """
    tau = config.alm_temperature
    log_b = _chunk_log_likelihood(student_logits, student_ids, chunks.student_chunk_id, chunks) / tau
    log_a = _chunk_log_likelihood(teacher_logits, teacher_ids, chunks.teacher_chunk_id, chunks) / tau
    divergence = bernoulli_kl(log_b, log_a) if config.reverse_kl else bernoulli_kl(log_a, log_b)
    in_force, count, metrics = chunk_shares(chunks, denominator)
    metrics["num_valid_chunks"] = count
    return TeacherTerm(share(masked_sum(divergence, chunks.valid), in_force), count, metrics)


def bernoulli_kl(log_a: Float[Tensor, "*shape"], log_b: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """`KL(Bernoulli(a) || Bernoulli(b))` in nats, from log-probabilities, which are kept below `-1e-10`."""
    log_a, log_b = log_a.clamp(max=-EPSILON), log_b.clamp(max=-EPSILON)
    heads = log_a.exp() * (log_a - log_b)
    tails = -torch.expm1(log_a) * (torch.log(-torch.expm1(log_a)) - torch.log(-torch.expm1(log_b)))
    return heads + tails


def _chunk_log_likelihood(
    logits: Float[Tensor, "B T V"], ids: Int[Tensor, "B T"], chunk_id: Int[Tensor, "B T"], chunks: ChunkView
) -> Float[Tensor, "B P"]:
    nll, _ = get_op("cross_entropy", logits.device)(logits[:, :-1], ids[:, 1:])
    means, sizes = get_op("chunk_mean", logits.device)(nll.unsqueeze(-1), chunk_id[:, :-1], chunks.max_chunks)
    total: Tensor = means.squeeze(-1) * (sizes + EPSILON)
    return -total
