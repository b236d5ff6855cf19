"""Coverage of a teacher by a projection: its tokens that some row names, and its probability on the others."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from xtoken_core.projection.files import TopKProjection

ROWS = 64
"""Positions whose probabilities are in memory at once."""


def named_tokens(projection: TopKProjection, teacher_vocab_size: int) -> Bool[Tensor, " V_t"]:
    """Return True for every teacher token that some row names with a weight above 0.

    Args:
        projection: The rows.
        teacher_vocab_size: `V_t`; ids beyond are ignored.
    """
    indices, weights = projection.indices, projection.likelihoods
    used = indices[(indices >= 0) & (indices < teacher_vocab_size) & (weights > 0)]
    return torch.bincount(used.long(), minlength=teacher_vocab_size) > 0


def unnamed_fraction(named: Bool[Tensor, " V_t"], ids: Int[Tensor, " n"]) -> float:
    """Return the fraction of a text's teacher tokens that no row names; 0 for an empty text.

    Args:
        named: The result of `named_tokens`.
        ids: Teacher tokens of the text.
    """
    return float((~named[ids]).float().mean()) if len(ids) else 0.0


def unreachable_mass(named: Bool[Tensor, " V_t"], logits: Iterable[Float[Tensor, "T V_m"]]) -> float:
    """Return the mean probability of the teacher on tokens that no row names: P-KL has no gradient for it.

    Args:
        named: The result of `named_tokens`.
        logits: The teacher's logits at the positions of texts; a head wider than the vocabulary is cut.
    """
    total, positions, unnamed = 0.0, 0, (~named).float()
    for of_text in logits:
        for rows in torch.split(of_text[:, : len(named)], ROWS):
            total += float((rows.float().softmax(dim=-1) @ unnamed).sum())
        positions += len(of_text)
    return total / max(positions, 1)
