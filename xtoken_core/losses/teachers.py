"""How several teachers are weighed against each other on a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core import schema
from xtoken_core.losses.common import CE_EPSILON, LossTeacher
from xtoken_core.losses.cross_entropy import predicted_ids
from xtoken_core.losses.lazy_logits import Logits, map_positions
from xtoken_core.losses.masks import next_token_mask
from xtoken_core.losses.token_blocks import BLOCK_ROWS
from xtoken_core.ops import get_op
from xtoken_core.ops.numerics import kl_terms, upcast

Score = Literal["ce", "entropy", "max_prob"]
FLOAT_ROWS = 256
"""Positions of a head whose float32 log-probabilities are held at once."""


def teacher_tokens(
    batch: Mapping[str, Tensor], teacher: LossTeacher, index: int | None
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """The ids and token mask that a teacher read: the student's own if they share the tokenizer."""
    if teacher.same_tokenizer:
        return batch[schema.INPUT_IDS.name], batch[schema.TOKEN_MASK.name]
    ids = batch[schema.field_name(schema.TEACHER_INPUT_IDS, index)]
    return ids, batch[schema.field_name(schema.TEACHER_TOKEN_MASK, index)]


def masked_cross_entropy(
    logits: Logits,
    ids: Int[Tensor, "B T"],
    token_mask: Int[Tensor, "B T"],
    sample_mask: Float[Tensor, " B"],
) -> Float[Tensor, ""]:
    """A teacher's mean next-token loss on its own tokens of the micro-batch, at temperature 1 and full width."""
    mask = next_token_mask(token_mask, sample_mask)
    op = get_op("cross_entropy", logits.device)
    losses = map_positions(lambda x, targets: op(x, targets)[0], logits, predicted_ids(ids), rows=BLOCK_ROWS)[:, :-1]
    return (torch.where(mask > 0, losses, 0.0) * mask).sum() / (mask.sum() + CE_EPSILON)


def teacher_score(
    kind: Score,
    logits: Logits,
    ids: Int[Tensor, "B T"],
    token_mask: Int[Tensor, "B T"],
    sample_mask: Float[Tensor, " B"],
) -> Float[Tensor, ""]:
    """How much a teacher is to be trusted on the micro-batch: the higher, the more. No gradient.

    Args:
        kind: `ce`: minus its masked next-token loss. `entropy`: minus the mean entropy of its predictions, at every
            unmasked token. `max_prob`: the mean of its largest probability there.
        logits: The uncut head, at temperature 1.
        ids: The teacher's tokens.
        token_mask: 1 for tokens to learn.
        sample_mask: 0 for samples to leave out.
    """
    logits = logits.detach()
    if kind == "ce":
        return -masked_cross_entropy(logits, ids, token_mask, sample_mask)

    def per_row(x: Tensor, _: Tensor) -> Tensor:
        log_p = torch.log_softmax(upcast(x), dim=-1)
        return kl_terms(log_p, torch.zeros_like(log_p)).sum(-1) if kind == "entropy" else log_p.amax(-1).exp()

    per_position = map_positions(per_row, logits, ids, rows=FLOAT_ROWS)
    mask = token_mask.float() * sample_mask.float().unsqueeze(1)
    return (torch.where(mask > 0, per_position, 0.0) * mask).sum() / (mask.sum() + CE_EPSILON)


def vocabulary_factors(teachers: Sequence[LossTeacher]) -> list[float]:
    """`log V_i / log min V`: a uniform guess costs every teacher's loss the same after this."""
    smallest = min(teacher.vocab_size for teacher in teachers)
    return [math.log(teacher.vocab_size) / math.log(smallest) for teacher in teachers]


def lowest_index_of_minimum(values: Float[Tensor, " n"]) -> Int[Tensor, ""]:
    """The place of the smallest value, the first of equal ones, as a tensor on the same device."""
    places = torch.arange(values.shape[0], device=values.device)
    return torch.where(values == values.min(), places, values.shape[0] - 1).min()
