"""KL between models that share a tokenizer, token by token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.losses.base import Loss
from xtoken_core.losses.common import CE_EPSILON, Divergence, LossInput, Pairing, Scalar, TeacherTerm
from xtoken_core.losses.lazy_logits import Logits, cut
from xtoken_core.losses.masks import SampleTokens, next_token_targets, student_tokens
from xtoken_core.ops import get_op
from xtoken_core.ops.numerics import floored_log, kl_terms, upcast
from xtoken_core.ops.token_kl.reference import TokenKLOptions, TokenKLResult
from xtoken_core.topk_logits import TopKLogits


class SameTokenizerLoss(Loss):
    """KL of every position over one set of tokens, both sides renormalised inside it.

    Mask, shift and denominator are those of the cross-entropy.
    """

    per_token = True

    @property
    def vocab_size(self) -> int:
        """`V_s`: the teacher is cut to the student's vocabulary."""
        return self.student_vocab_size

    @property
    def with_cross_entropy(self) -> bool:  # type: ignore[override]  # the op compares whole vocabularies
        """True if the whole vocabulary is compared: the op then takes both losses from one reading."""
        return self.config.vocab_topk is None

    @property
    def compares_subset(self) -> bool:
        """True if `vocab_topk` is smaller than the vocabulary."""
        k = self.config.vocab_topk
        return k is not None and k < self.vocab_size

    def columns(self, teacher_logits: Logits) -> Int[Tensor, " K"] | None:
        """Return the `vocab_topk` tokens that the teacher rates highest in the micro-batch; None: all."""
        k = self.config.vocab_topk
        return None if k is None else self.top_columns(teacher_logits, k)

    def pairing(self, batch: Mapping[str, Tensor]) -> Pairing:
        """Return the student's targets: both sides have the same positions."""
        return Pairing(next_token_targets(batch))

    def tokens(self, batch: Mapping[str, Tensor]) -> SampleTokens:
        """Return the student's own tokens."""
        return student_tokens(batch)

    def count(self, batch: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """Return the micro-batch's number of next-token predictions."""
        return student_tokens(batch).next_weights().sum()

    def evaluate(self, inputs: LossInput[Tensor]) -> Divergence:
        """Compute the KL of every position; with `with_tokens` the cross-entropy too."""
        config, columns, teacher = self.config, inputs.columns, inputs.teacher_logits
        if columns is None:
            settings = TokenKLOptions(self.vocab_size, config.temperature, config.reverse_kl, inputs.overwrite)
            op = get_op("token_kl", teacher.device)
            result: TokenKLResult = op(inputs.student_logits, teacher, inputs.pairing.student_targets, settings)
            tokens = (result.losses, result.hits) if inputs.with_tokens else None
            return Divergence((result.kl,), result.agrees, tokens=tokens)
        student = cut(inputs.student_logits, self.student_vocab_size).index_select(-1, columns)  # [B, T_s, K]
        if not inputs.gathered:
            teacher = cut(teacher, self.vocab_size).index_select(-1, columns)  # [B, T_t, K]
        log_q, log_p = (torch.log_softmax(upcast(logits) / config.temperature, dim=-1) for logits in (student, teacher))
        terms = kl_terms(log_q, log_p) if config.reverse_kl else kl_terms(log_p, log_q)
        return Divergence((terms.sum(-1),), log_q.detach().argmax(-1) == log_p.argmax(-1))

    def evaluate_topk(self, inputs: LossInput[TopKLogits]) -> Divergence:
        """Compute the KL of every position over its own listed tokens and one class of all others."""
        V = self.student_vocab_size
        targets = inputs.pairing.student_targets
        teacher = inputs.teacher_logits.with_own(targets, (targets >= 0) & (targets < V))
        log_q = torch.log_softmax(upcast(cut(inputs.student_logits, V)) / self.config.temperature, dim=-1)
        agrees = log_q.detach().argmax(-1) == teacher.ids[..., 0]
        # [B, T_s, V + 1]: empty entries of a list point at column V.
        padded = torch.nn.functional.pad(log_q, (0, 1), value=-torch.inf)  # empty entries have no mass
        others = floored_log(padded.scatter(-1, teacher.columns, -torch.inf).exp().sum(-1))
        # A list of the whole vocabulary has no class of others: its floored logarithm would be compared with -inf.
        others = others.masked_fill(teacher.unlisted == 0, -torch.inf)
        of_student = torch.cat([padded.gather(-1, teacher.columns), others.unsqueeze(-1)], dim=-1)
        of_teacher = torch.cat([teacher.log_probs(), teacher.log_rest.unsqueeze(-1)], dim=-1).to(of_student.dtype)
        pair = (of_student, of_teacher) if self.config.reverse_kl else (of_teacher, of_student)
        tokens = None
        if inputs.with_tokens:
            tokens = get_op("cross_entropy", log_q.device)(inputs.student_logits, targets)
        return Divergence((kl_terms(*pair).sum(-1),), agrees, tokens=tokens)

    def reduce(self, batch: Mapping[str, Tensor], divergence: Divergence, denominator: Scalar | None) -> TeacherTerm:
        """Reduce to the mean over next-token predictions, times `T^2`.

        Args:
            batch: Holds `input_ids`, `token_mask` and `sample_mask`.
            divergence: One part `[B, T_s]`.
            denominator: The step's next-token predictions; None: this micro-batch's.
        """
        mask = student_tokens(batch).next_weights()  # [B, T_s - 1]
        count = mask.sum()
        step = count if denominator is None else denominator
        # `where` before the product: masked positions may hold NaN.
        total = (torch.where(mask > 0, divergence.parts[0][:, :-1], 0.0) * mask).sum()
        metrics = {"num_valid_toks": count}
        if divergence.agrees is not None:
            metrics["proj_accuracy"] = (divergence.agrees[:, :-1] * mask).sum() / (step + CE_EPSILON)
        return TeacherTerm(total / (step + CE_EPSILON) * self.config.temperature**2, count, metrics)
