"""Next-token cross-entropy of the student, over its whole head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from xtoken_core import schema
from xtoken_core.losses.common import CE_EPSILON, Scalar
from xtoken_core.losses.masks import of_samples, student_tokens


class CrossEntropy(NamedTuple):
    """A micro-batch's part of the step's mean cross-entropy.

    Attributes:
        loss: Nats per predicted token.
        accuracy: Fraction of predicted tokens that were the first guess; no gradient.
    """

    loss: Float[Tensor, ""]
    accuracy: Float[Tensor, ""]


def next_token_weights(batch: Mapping[str, Tensor]) -> Float[Tensor, "B T_minus_1"]:
    """Return the weight of each next-token prediction in the cross-entropy, 0 in generated rows."""
    tokens = student_tokens(batch)
    weights = tokens.next_weights()
    version = batch.get(schema.WEIGHTS_VERSION.name)
    if version is None:
        return weights
    # Whatever version wrote it: the student's own text is no target for itself.
    given = of_samples((version < 0).float(), tokens.sample)  # [B, 1], or [B, T] of a packed row
    return weights * (given if tokens.sample is None else given[:, 1:])


def mean_over_tokens(
    batch: Mapping[str, Tensor],
    losses: Float[Tensor, "B T"],
    hits: Bool[Tensor, "B T"],
    global_valid_toks: Scalar | None = None,
) -> CrossEntropy:
    """Compute this micro-batch's part of the step's mean over unmasked next tokens.

    A row that the student has generated has no part in it: its own samples are no targets.

    Args:
        batch: Holds `input_ids`, `token_mask`, `sample_mask`, and `weights_version` where rows may be generated.
        losses: Nats at each position.
        hits: True where the position's first guess was right.
        global_valid_toks: The step's number of predictions; None: this micro-batch's.
    """
    mask = next_token_weights(batch)
    count = mask.sum() if global_valid_toks is None else global_valid_toks
    total = (torch.where(mask > 0, losses[:, :-1], 0.0) * mask).sum()
    return CrossEntropy(total / (count + CE_EPSILON), (hits[:, :-1] * mask).sum() / (count + CE_EPSILON))
