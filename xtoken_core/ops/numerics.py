"""The few numerical habits that every reference shares."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

EPSILON = 1e-10
"""Added to a chunk's length and to projected probabilities, as the method's reference does."""


def upcast(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """`x` in float32; float64 stays as it is."""
    return x if x.dtype == torch.float64 else x.float()


def kl_terms(log_p: Float[Tensor, "*shape"], log_q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """`p (log p - log q)` term by term, with `0 * -inf = 0` in value and gradient.

    Args:
        log_p: Log-probabilities of the distribution that weighs the terms; may hold `-inf`.
        log_q: Log-probabilities of the other one.
    """
    p = log_p.exp()
    empty = p == 0
    difference = log_p.masked_fill(empty, 0.0) - log_q.masked_fill(empty, 0.0)
    return p * difference
