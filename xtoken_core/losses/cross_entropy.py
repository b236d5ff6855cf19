"""Next-token cross-entropy of the student, over its whole head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from xtoken_core import schema
from xtoken_core.losses.common import CE_EPSILON, Scalar
from xtoken_core.losses.masks import next_token_mask
from xtoken_core.ops import get_op


class CrossEntropy(NamedTuple):
    """The cross-entropy of a micro-batch as its share of the step's mean.

    Attributes:
        loss: Nats per predicted token.
        accuracy: Share of predicted tokens that were the first guess; no gradient.
    """

    loss: Float[Tensor, ""]
    accuracy: Float[Tensor, ""]


def cross_entropy_loss(
    batch: Mapping[str, Tensor],
    logits: Float[Tensor, "B T V"],
    global_valid_toks: Scalar | None = None,
) -> CrossEntropy:
    """Mean negative log-likelihood of the next tokens that the masks leave.

    Args:
        batch: Holds `input_ids`, `token_mask`, `sample_mask`.
        logits: The student's, its whole head.
        global_valid_toks: The step's number of predictions; None: this micro-batch's.
    """
    mask = next_token_mask(batch[schema.TOKEN_MASK.name], batch[schema.SAMPLE_MASK.name])
    targets = batch[schema.INPUT_IDS.name][:, 1:]
    losses, hits = get_op("cross_entropy", logits.device)(logits[:, :-1], targets)
    count = mask.sum() if global_valid_toks is None else global_valid_toks
    counted = mask > 0
    total = (torch.where(counted, losses, 0.0) * mask).sum()
    return CrossEntropy(total / (count + CE_EPSILON), (hits * mask).sum() / (count + CE_EPSILON))
