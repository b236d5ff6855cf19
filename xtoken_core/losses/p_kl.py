"""P-KL: KL of chunk averages after projecting the student's distribution onto the teacher's vocabulary.

Of a teacher given by its largest logits, all tokens that are not compared are one more class.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from xtoken_core.config.loss import LossConfig, LossMode
from xtoken_core.losses.base import ChunkLoss
from xtoken_core.losses.common import Divergence, LossInput, LossTeacher, Pairing
from xtoken_core.losses.lazy_logits import Logits, cut
from xtoken_core.ops import get_op
from xtoken_core.ops.numerics import upcast
from xtoken_core.ops.p_kl.reference import (
    PKLCrossEntropyResult,
    PKLOptions,
    PKLResult,
    compared_chunks,
    teacher_log_probs,
)
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


def p_kl_with_rest(
    student_logits: Float[Tensor, "B T_s V_s"],
    teacher: TopKLogits,
    projection: ProjectionMatrix,
    columns: Int[Tensor, " K"],
    student_chunk_id: Int[Tensor, "B T_s"],
    teacher_chunk_id: Int[Tensor, "B T_t"],
    options: PKLOptions,
) -> tuple[Float[Tensor, "B P"], Bool[Tensor, "B P"], Float[Tensor, "B P"]]:
    """Compute `ops.p_kl` over `columns` and one class of all other tokens; without others the class is left out.

    A token that a position does not list has an equal part of that position's rest.

    Args:
        student_logits: Cut to the student's vocabulary.
        teacher: The teacher's largest logits.
        projection: `W [V_s, V_t]`.
        columns: The compared teacher ids.
        student_chunk_id: Chunk of each student position, -1 = none.
        teacher_chunk_id: Likewise.
        options: Settings of the comparison; `gathered` and `overwrite` have no effect.

    Returns:
        `kl`, `agrees` and `mass` of `PKLResult`.
    """
    logits = upcast(student_logits)
    probabilities = torch.softmax(logits if options.temperature == 1.0 else logits / options.temperature, dim=-1)
    chunk_mean = get_op("chunk_mean", logits.device)
    q: Tensor = chunk_mean(probabilities, student_chunk_id, options.max_chunks)[0]  # [B, P, V_s]
    projected: Tensor = get_op("sparse_projection", q.device)(q, projection)  # [B, P, V_t]
    del logits, probabilities, q  # what the backward needs of them is kept there
    Q = projected.index_select(-1, columns)
    if len(columns) < teacher.vocab_size:
        others = projected.index_fill(-1, columns, 0.0).sum(-1, keepdim=True)
        Q = torch.cat([Q, others], dim=-1)  # [B, P, K + 1]
    scaled = column_log_probs(teacher, columns).to(Q.dtype)
    return compared_chunks(Q, teacher_log_probs(scaled, teacher_chunk_id, options), options)


def column_log_probs(teacher: TopKLogits, columns: Int[Tensor, " K"]) -> Float[Tensor, "B T W"]:
    """Return the log-probabilities of `columns`, then that of all other tokens if there are any.

    Args:
        teacher: The teacher's largest logits.
        columns: Tokens, distinct.
    """
    K, V = len(columns), teacher.vocab_size
    # [V + 1] slot of each token; the last entry is for empty entries of a list.
    index = columns.new_full((V + 1,), K).scatter(0, columns, torch.arange(K, device=columns.device))
    slot = index[teacher.columns]  # [B, T, k], K for tokens that are not compared
    log_probs = teacher.log_probs()
    inside = slot < K
    whole = teacher.log_equal_part().unsqueeze(-1).repeat(1, 1, K + 1).scatter(-1, slot, log_probs)
    if K == V:
        return whole[..., :K]
    unlisted = teacher.unlisted
    # Compared tokens that are not listed have their equal part in their own slot already.
    outside = (unlisted - (K - inside.sum(-1))) / unlisted.clamp(min=1)  # fraction of the unlisted tokens
    rest = torch.where(inside, 0.0, log_probs.exp()).sum(-1) + teacher.log_rest.exp() * outside
    whole[..., K] = rest.clamp(min=torch.finfo(rest.dtype).tiny).log()
    return whole
