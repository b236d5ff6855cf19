"""Scores by which several teachers are weighted, or one of them selected, on a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.losses.common import CE_EPSILON, LossTeacher
from xtoken_core.losses.lazy_logits import Logits, map_positions
from xtoken_core.losses.masks import SampleTokens, predicted_ids
from xtoken_core.losses.token_blocks import BLOCK_ROWS
from xtoken_core.ops import get_op
from xtoken_core.ops.numerics import kl_terms, upcast
from xtoken_core.topk_logits import TopKLogits

Score = Literal["ce", "entropy", "max_prob"]
# 256 positions of 150,000 tokens are 150 MB in float32, and a log-softmax needs two of these.
FLOAT_ROWS = 256
"""Positions of a head whose float32 log-probabilities are in memory at once."""


def masked_cross_entropy(logits: Logits, tokens: SampleTokens) -> Float[Tensor, ""]:
    """Compute a teacher's mean next-token loss on its own tokens of the micro-batch, at temperature 1 and full width.

    Args:
        logits: The uncut head, `[B, T, V_m]`.
        tokens: The teacher's.
    """
    mask, targets = tokens.next_weights(), predicted_ids(tokens.ids)
    if isinstance(logits, TopKLogits):
        # The text's own tokens are sent with the largest logits, listed or not: this score is exact.
        own = logits.own[:, :-1]
        return -(torch.where(mask > 0, own, 0.0) * mask).sum() / (mask.sum() + CE_EPSILON)
    op = get_op("cross_entropy", logits.device)
    losses = map_positions(lambda x, ids: op(x, ids)[0], logits, targets, rows=BLOCK_ROWS)[:, :-1]
    return (torch.where(mask > 0, losses, 0.0) * mask).sum() / (mask.sum() + CE_EPSILON)


def teacher_score(kind: Score, logits: Logits, tokens: SampleTokens) -> Float[Tensor, ""]:
    """Compute a teacher's score on the micro-batch, higher for a better teacher; no gradient.

    Args:
        kind: `ce`: minus its masked next-token loss. `entropy`: minus the mean entropy of its predictions, at every
            unmasked token. `max_prob`: the mean of its largest probability there.
        logits: The uncut head, at temperature 1.
        tokens: The teacher's.
    """
    logits = logits.detach()
    if kind == "ce":
        return -masked_cross_entropy(logits, tokens)

    def per_row(x: Tensor, _: Tensor) -> Tensor:
        log_p = torch.log_softmax(upcast(x), dim=-1)
        return kl_terms(log_p, torch.zeros_like(log_p)).sum(-1) if kind == "entropy" else log_p.amax(-1).exp()

    if isinstance(logits, TopKLogits) and kind == "max_prob":
        per_position = (logits.values.amax(-1) - logits.log_z).exp()
    else:
        per_position = map_positions(per_row, logits, tokens.ids, rows=FLOAT_ROWS)
    mask = tokens.weights()
    return (torch.where(mask > 0, per_position, 0.0) * mask).sum() / (mask.sum() + CE_EPSILON)


def vocabulary_factors(teachers: Sequence[LossTeacher]) -> list[float]:
    """Return `log V_i / log min V` per teacher."""
    smallest = min(teacher.vocab_size for teacher in teachers)
    return [math.log(teacher.vocab_size) / math.log(smallest) for teacher in teachers]


def lowest_index_of_minimum(values: Float[Tensor, " n"]) -> Int[Tensor, ""]:
    """Return the index of the smallest value, the lowest on ties, as a tensor on the same device."""
    indices = torch.arange(values.shape[0], device=values.device)
    # Of equal values the lowest index on every backend, without a wait for the device.
    return torch.where(values == values.min(), indices, values.shape[0] - 1).min()
