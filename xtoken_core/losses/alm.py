"""ALM: both models' likelihoods of a chunk's own tokens, compared as Bernoulli distributions."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.config.loss import LossMode
from xtoken_core.losses.base import ChunkLoss
from xtoken_core.losses.common import Divergence, EvalOptions, Pairing
from xtoken_core.losses.lazy_logits import cut
from xtoken_core.ops import get_op
from xtoken_core.ops.numerics import EPSILON, kl_terms


class ALMLoss(ChunkLoss):
    """Approximate likelihood matching (Minixhofer et al. 2025, arXiv 2503.20083): the Bernoulli KL of every chunk.

    `p` is the product of a side's probabilities of the chunk's own tokens, at temperature 1; compared are
    `p_t^(1/tau)` and `p_s^(1/tau)`, `tau = alm_temperature`.
    """

    mode: ClassVar[LossMode] = "alm"
    reads_teacher_targets = True

    @property
    def scale(self) -> float:
        """1: likelihoods are taken at temperature 1."""
        return 1.0

    def evaluate(
        self,
        pairing: Pairing,
        student_logits: Float[Tensor, "B T_s V_head"],
        teacher_logits: Float[Tensor, "B T_t W"],
        columns: Int[Tensor, " K"] | None,
        options: EvalOptions,
    ) -> Divergence:
        """Compute the Bernoulli KL of every chunk.

        Raises:
            ValueError: The pairing lacks the tokens that the teacher's positions predict.
        """
        if pairing.teacher_targets is None:
            raise ValueError("ALM needs the tokens that the teacher's positions predict")
        student, teacher = cut(student_logits, self.student_vocab_size), cut(teacher_logits, self.vocab_size)
        student_chunk_id, teacher_chunk_id = pairing.chunk_ids
        tau, P = self.config.alm_temperature, pairing.max_chunks
        log_s = chunk_log_likelihood(student, pairing.student_targets, student_chunk_id, P) / tau
        log_t = chunk_log_likelihood(teacher, pairing.teacher_targets, teacher_chunk_id, P) / tau
        return Divergence((bernoulli_kl(log_s, log_t) if self.config.reverse_kl else bernoulli_kl(log_t, log_s),))


def bernoulli_kl(log_a: Float[Tensor, "*shape"], log_b: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute `KL(Bernoulli(a) || Bernoulli(b))` in nats; `0 * -inf = 0`.

    Args:
        log_a: Log-probabilities of success.
        log_b: Likewise.
    """
    # At log p = 0 the other outcome has log-probability -inf: a side that is certain would cost the other infinity.
    log_a, log_b = log_a.clamp(max=-EPSILON), log_b.clamp(max=-EPSILON)
    # log(1 - p) through expm1: 1 - exp(log p) loses all digits where p is near 1, and with tau = 100 it always is.
    not_a, not_b = (torch.log(-torch.expm1(log_p)) for log_p in (log_a, log_b))
    return kl_terms(log_a, log_b) + kl_terms(not_a, not_b)


def chunk_log_likelihood(
    logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"], chunk_id: Int[Tensor, "B T"], max_chunks: int
) -> Float[Tensor, "B P"]:
    """Compute the summed log-probability of each chunk's own tokens.

    Args:
        logits: Any floating dtype.
        targets: The token that each position predicts.
        chunk_id: The chunk of each position, -1 = none.
        max_chunks: `P`.
    """
    nll, _ = get_op("cross_entropy", logits.device)(logits, targets)
    means, sizes = get_op("chunk_mean", logits.device)(nll.unsqueeze(-1), chunk_id, max_chunks)
    total: Tensor = means.squeeze(-1) * (sizes + EPSILON)  # the op divides by sizes + EPSILON
    return -total
