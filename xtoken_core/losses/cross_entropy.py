"""Next-token cross-entropy of the student, over its whole head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from xtoken_core import schema
from xtoken_core.losses.common import CE_EPSILON, Scalar
from xtoken_core.losses.masks import next_token_mask


class CrossEntropy(NamedTuple):
    """The cross-entropy of a micro-batch as its share of the step's mean.

    Attributes:
        loss: Nats per predicted token.
        accuracy: Share of predicted tokens that were the first guess; no gradient.
    """

    loss: Float[Tensor, ""]
    accuracy: Float[Tensor, ""]


def predicted_ids(ids: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """The id that each position predicts; the last position predicts none, its 0 has no weight."""
    return torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], dim=1)


def next_token_targets(batch: Mapping[str, Tensor]) -> Int[Tensor, "B T"]:
    """`predicted_ids` of the student's own tokens.

    Args:
        batch: Holds `input_ids`.
    """
    return predicted_ids(batch[schema.INPUT_IDS.name])


def mean_over_tokens(
    batch: Mapping[str, Tensor],
    losses: Float[Tensor, "B T"],
    hits: Bool[Tensor, "B T"],
    global_valid_toks: Scalar | None = None,
) -> CrossEntropy:
    """This micro-batch's share of the step's mean over the next tokens that the masks leave.

    Args:
        batch: Holds `token_mask`, `sample_mask`.
        losses: Nats at each position.
        hits: Whether each position's first guess was right.
        global_valid_toks: The step's number of predictions; None: this micro-batch's.
    """
    mask = next_token_mask(batch[schema.TOKEN_MASK.name], batch[schema.SAMPLE_MASK.name])
    count = mask.sum() if global_valid_toks is None else global_valid_toks
    total = (torch.where(mask > 0, losses[:, :-1], 0.0) * mask).sum()
    return CrossEntropy(total / (count + CE_EPSILON), (hits[:, :-1] * mask).sum() / (count + CE_EPSILON))
