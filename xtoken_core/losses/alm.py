"""ALM: both models' likelihoods of a chunk's own tokens, compared as Bernoulli distributions."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.config.loss import LossMode
from xtoken_core.losses.base import ChunkLoss
from xtoken_core.losses.common import Divergence, EvalOptions, Pairing
from xtoken_core.losses.lazy_logits import cut
from xtoken_core.ops import get_op
from xtoken_core.ops.numerics import EPSILON, bernoulli_kl
from xtoken_core.topk_logits import TopKLogits


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
        teacher, chunk_id = cut(teacher_logits, self.vocab_size), pairing.chunk_ids[1]
        log_t = chunk_log_likelihood(teacher, pairing.teacher_targets, chunk_id, pairing.max_chunks)
        return self._divergence(pairing, student_logits, log_t)

    def evaluate_topk(
        self,
        pairing: Pairing,
        student_logits: Float[Tensor, "B T_s V_head"],
        teacher: TopKLogits,
        columns: Int[Tensor, " K"] | None,
        options: EvalOptions,
    ) -> Divergence:
        """Compute the same from the log-probabilities of the text's own tokens: nothing is lost."""
        log_t = chunk_sum(teacher.own, pairing.chunk_ids[1], pairing.max_chunks)
        return self._divergence(pairing, student_logits, log_t)

    def _divergence(self, pairing: Pairing, student_logits: Tensor, log_t: Tensor) -> Divergence:
        """Return the divergence from the teacher's log-likelihood of every chunk."""
        student, tau = cut(student_logits, self.student_vocab_size), self.config.alm_temperature
        log_s = chunk_log_likelihood(student, pairing.student_targets, pairing.chunk_ids[0], pairing.max_chunks) / tau
        log_t = log_t / tau
        return Divergence((bernoulli_kl(log_s, log_t) if self.config.reverse_kl else bernoulli_kl(log_t, log_s),))


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
    return -chunk_sum(nll, chunk_id, max_chunks)


def chunk_sum(values: Float[Tensor, "B T"], chunk_id: Int[Tensor, "B T"], max_chunks: int) -> Float[Tensor, "B P"]:
    """Return the sum of each chunk's values.

    Args:
        values: One per position.
        chunk_id: The chunk of each position, -1 = none.
        max_chunks: `P`.
    """
    means, sizes = get_op("chunk_mean", values.device)(values.unsqueeze(-1), chunk_id, max_chunks)
    total: Tensor = means.squeeze(-1) * (sizes + EPSILON)  # the op divides by sizes + EPSILON
    return total
