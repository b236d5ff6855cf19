"""KL between models that share a tokenizer, token by token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from xtoken_core import schema
from xtoken_core.config.loss import LossConfig
from xtoken_core.losses.common import CE_EPSILON, Scalar, TeacherTerm
from xtoken_core.losses.masks import next_token_mask
from xtoken_core.ops import get_op
from xtoken_core.ops.numerics import kl_terms, upcast


def same_tokenizer_loss(
    batch: Mapping[str, Tensor],
    student_logits: Float[Tensor, "B T V_s"],
    teacher_logits: Float[Tensor, "B T V_s"],
    config: LossConfig,
    denominator: Scalar | None,
    *,
    vocab_topk: int | None,
) -> TeacherTerm:
    """`T^2` times the mean per-position KL over one set of tokens that the teacher chooses for the micro-batch.

    Both sides are renormalised inside the set; mask, shift and denominator are the cross-entropy's.

    Args:
        batch: Holds `token_mask` and `sample_mask`.
        student_logits: Cut to the vocabulary.
        teacher_logits: Cut to the student's vocabulary.
        config: The loss's settings.
        denominator: The step's next-token predictions; None: this micro-batch's.
        vocab_topk: How many tokens are compared; None: all.
    """
    mask = next_token_mask(batch[schema.TOKEN_MASK.name], batch[schema.SAMPLE_MASK.name])
    k = vocab_topk or teacher_logits.shape[-1]
    columns = get_op("select_topk_columns", teacher_logits.device)(teacher_logits, k)
    log_q, log_p = (
        torch.log_softmax(upcast(logits[:, :-1].index_select(-1, columns)) / config.temperature, dim=-1)
        for logits in (student_logits, teacher_logits)
    )
    terms = kl_terms(log_q, log_p) if config.reverse_kl else kl_terms(log_p, log_q)
    count = mask.sum()
    total = (torch.where(mask > 0, terms.sum(-1), 0.0) * mask).sum()
    in_force = count if denominator is None else denominator
    agrees = (log_q.detach().argmax(-1) == log_p.argmax(-1)) * mask
    metrics = {"proj_accuracy": agrees.sum() / (in_force + CE_EPSILON), "num_valid_toks": count}
    return TeacherTerm(total / (in_force + CE_EPSILON) * config.temperature**2, count, metrics)
