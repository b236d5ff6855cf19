"""P-KL: KL of chunk averages after projecting the student's distribution onto the teacher's vocabulary."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.config.loss import LossConfig, LossMode
from xtoken_core.losses.base import ChunkLoss
from xtoken_core.losses.common import Divergence, LossInput, LossTeacher, Pairing
from xtoken_core.losses.lazy_logits import Logits, cut
from xtoken_core.losses.p_kl_rest import column_log_probs, p_kl_with_rest
from xtoken_core.ops import get_op
from xtoken_core.ops.p_kl.reference import PKLCrossEntropyResult, PKLOptions, PKLResult
from xtoken_core.ops.sparse_projection.matrix import ProjectionMatrix
from xtoken_core.topk_logits import TopKLogits


class PKLLoss(ChunkLoss):
    """KL over the `K` compared teacher tokens, per chunk: `sum_K exp(L) (L - log Q)`.

    `Q` is the chunk average of `softmax(z_s / T) W`, renormalised inside `K`; `L` the chunk average of the teacher's
    log-probabilities inside `K` (`docs/operators/p_kl.md`).
    """

    mode: ClassVar[LossMode] = "p_kl"
    count_name = "num_valid_pairs"
    with_cross_entropy = True
    accuracy_counts_masked = True  # as the public implementation does, for this loss only

    def __init__(
        self, config: LossConfig, teacher: LossTeacher, *, index: int, student_vocab_size: int, device: torch.device
    ) -> None:
        """Build the projection matrix `W [V_s, V_t]` on the device; arguments as for `Loss`."""
        super().__init__(config, teacher, index=index, student_vocab_size=student_vocab_size, device=device)
        V_s, V_t = student_vocab_size, teacher.vocab_size
        if teacher.matrix is not None:
            projection = ProjectionMatrix.from_sparse(teacher.matrix, student_vocab_size=V_s, teacher_vocab_size=V_t)
        else:
            rows = teacher.rows()
            projection = ProjectionMatrix.from_topk(*rows, student_vocab_size=V_s, teacher_vocab_size=V_t)
        self.projection = projection.to(device)
        # Columns of W without an entry: no student token reaches these teacher tokens.
        self.unreachable = (self.projection.offsets.diff() == 0).float()  # [V_t], 1 where no row names the token

    @property
    def compares_subset(self) -> bool:
        """True if `vocab_topk` is smaller than the teacher's vocabulary."""
        k = self.config.vocab_topk
        return k is not None and k < self.vocab_size

    def columns(self, teacher_logits: Logits) -> Int[Tensor, " K"]:
        """Return the `vocab_topk` tokens that the teacher rates highest in the micro-batch."""
        return self.top_columns(teacher_logits, self.config.vocab_topk)

    def evaluate(self, inputs: LossInput[Tensor]) -> Divergence:
        """Compute the KL of every chunk; with `with_tokens` the cross-entropy too.

        With both, the student's rows are read once and one gradient is written.
        """
        config, pairing, student_logits = self.config, inputs.pairing, inputs.student_logits
        teacher = inputs.teacher_logits if inputs.gathered else cut(inputs.teacher_logits, self.vocab_size)
        compared = teacher, self.projection, inputs.columns, *pairing.chunk_ids
        p_kl_options = PKLOptions(
            pairing.max_chunks,
            config.temperature,
            config.reverse_kl,
            config.teacher_chunk_average,
            inputs.gathered,
            # With both losses in one pass this op is the last reader of the logits.
            inputs.overwrite or (inputs.with_tokens and config.gradient_in_place),
        )
        if not inputs.with_tokens:
            student = cut(student_logits, self.student_vocab_size)
            result: PKLResult = get_op("p_kl", student.device)(student, *compared, p_kl_options)
            return Divergence((result.kl,), result.agrees, result.mass, unreachable=result.unnamed)
        op = get_op("p_kl_cross_entropy", student_logits.device)
        both: PKLCrossEntropyResult = op(student_logits, *compared, pairing.student_targets, p_kl_options)
        return Divergence((both.kl,), both.agrees, both.mass, (both.losses, both.hits), both.unnamed)

    def evaluate_topk(self, inputs: LossInput[TopKLogits]) -> Divergence:
        """Compute the KL of every chunk over the compared tokens and one class of all others.

        Raises:
            ValueError: There are no columns.
        """
        pairing, teacher, columns = inputs.pairing, inputs.teacher_logits, inputs.columns
        if columns is None:
            raise ValueError("P-KL needs the compared tokens")
        config, student_chunk_id, teacher_chunk_id = self.config, *pairing.chunk_ids
        p_kl_options = PKLOptions(
            pairing.max_chunks, config.temperature, config.reverse_kl, config.teacher_chunk_average
        )
        student = cut(inputs.student_logits, self.student_vocab_size)
        kl, agrees, mass = p_kl_with_rest(
            student, teacher, self.projection, columns, student_chunk_id, teacher_chunk_id, p_kl_options
        )
        tokens = None
        if inputs.with_tokens:
            tokens = get_op("cross_entropy", student.device)(inputs.student_logits, pairing.student_targets)
        with torch.no_grad():
            unreached = (column_log_probs(teacher, columns).exp() * self._unreachable_part(columns)).sum(-1)
            unreachable = self._chunk_mean(unreached, pairing)
        return Divergence((kl,), agrees, mass, tokens, unreachable)

    def _unreachable_part(self, columns: Int[Tensor, " K"]) -> Float[Tensor, " W"]:
        """Return 1 for each compared token that no row names, 0 for others; then the fraction of all other tokens."""
        K, V = len(columns), self.vocab_size
        # [K]; the entry behind them is the class of all other tokens.
        inside = self.unreachable[columns]
        return inside if K == V else torch.cat([inside, (self.unreachable.sum() - inside.sum())[None] / (V - K)])

    @staticmethod
    def _chunk_mean(values: Float[Tensor, "B T_t"], pairing: Pairing) -> Float[Tensor, "B P"]:
        """Return the mean over each chunk's teacher positions."""
        chunk_id, max_chunks = pairing.chunk_ids[1], pairing.max_chunks
        means: Tensor = get_op("chunk_mean", values.device)(values.unsqueeze(-1), chunk_id, max_chunks)[0]
        return means.squeeze(-1)
