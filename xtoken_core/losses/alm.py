"""ALM: both models' likelihoods of a chunk's own tokens, compared as Bernoulli distributions."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.config.loss import LossMode
from xtoken_core.losses.base import ChunkLoss
from xtoken_core.losses.common import Divergence, LossInput
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

    def evaluate(self, inputs: LossInput[Tensor]) -> Divergence:
        """Compute the Bernoulli KL of every chunk.

        Raises:
            ValueError: The pairing lacks the tokens that the teacher's positions predict.
        """
        pairing = inputs.pairing
        if pairing.teacher_targets is None:
            raise ValueError("ALM needs the tokens that the teacher's positions predict")
        teacher, chunk_id = cut(inputs.teacher_logits, self.vocab_size), pairing.chunk_ids[1]
        log_t = chunk_log_likelihood(teacher, pairing.teacher_targets, chunk_id, pairing.max_chunks)
        return self._divergence(inputs, log_t)

    def evaluate_topk(self, inputs: LossInput[TopKLogits]) -> Divergence:
        """Compute the same from the log-probabilities of the text's own tokens: nothing is lost."""
        pairing = inputs.pairing
        return self._divergence(inputs, chunk_sum(inputs.teacher_logits.own, pairing.chunk_ids[1], pairing.max_chunks))

    def _divergence(self, inputs: LossInput[Any], log_t: Float[Tensor, "B P"]) -> Divergence:
        """Return the divergence from the teacher's log-likelihood of every chunk."""
        pairing, tau = inputs.pairing, self.config.alm_temperature
        student = cut(inputs.student_logits, self.student_vocab_size)
        # The exponent 1 / tau on a likelihood is a division of its logarithm.
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
