"""KL between models that share a tokenizer, token by token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core import schema
from xtoken_core.config.loss import LossConfig
from xtoken_core.losses.common import CE_EPSILON, Divergence, Scalar, TeacherTerm
from xtoken_core.losses.masks import next_token_mask
from xtoken_core.ops.numerics import kl_terms, upcast


def same_tokenizer_divergence(
    student_logits: Float[Tensor, "B T V_s"],
    teacher_logits: Float[Tensor, "B T V_t"],
    columns: Int[Tensor, " K"] | None,
    config: LossConfig,
    *,
    gathered: bool = False,
) -> Divergence:
    """KL of every position over one set of tokens, both sides renormalised inside it.

    Args:
        student_logits: Cut to the vocabulary.
        teacher_logits: Cut to the student's vocabulary.
        columns: The compared tokens; None: all.
        config: The loss's settings.
        gathered: Whether the teacher's logits are those of `columns` alone.
    """
    student = student_logits if columns is None else student_logits.index_select(-1, columns)
    teacher = teacher_logits if columns is None or gathered else teacher_logits.index_select(-1, columns)
    log_q, log_p = (torch.log_softmax(upcast(logits) / config.temperature, dim=-1) for logits in (student, teacher))
    terms = kl_terms(log_q, log_p) if config.reverse_kl else kl_terms(log_p, log_q)
    return Divergence((terms.sum(-1),), log_q.detach().argmax(-1) == log_p.argmax(-1))


def same_tokenizer_term(
    batch: Mapping[str, Tensor], divergence: Divergence, config: LossConfig, denominator: Scalar | None
) -> TeacherTerm:
    """`T^2` times the mean over positions; mask, shift and denominator are the cross-entropy's.

    Args:
        batch: Holds `token_mask` and `sample_mask`.
        divergence: Of every position.
        config: The loss's settings.
        denominator: The step's next-token predictions; None: this micro-batch's.
    """
    mask = next_token_mask(batch[schema.TOKEN_MASK.name], batch[schema.SAMPLE_MASK.name])
    count = mask.sum()
    total = (torch.where(mask > 0, divergence.parts[0][:, :-1], 0.0) * mask).sum()
    in_force = count if denominator is None else denominator
    metrics = {"num_valid_toks": count}
    if divergence.agrees is not None:
        metrics["proj_accuracy"] = (divergence.agrees[:, :-1] * mask).sum() / (in_force + CE_EPSILON)
    return TeacherTerm(total / (in_force + CE_EPSILON) * config.temperature**2, count, metrics)
