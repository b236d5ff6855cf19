"""The few numerical habits that every reference shares."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

EPSILON = 1e-10
"""Added to a chunk's length and to projected probabilities, as the method's reference does."""


def upcast(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return `x` in float32; float64 stays as it is."""
    return x if x.dtype == torch.float64 else x.float()


def floored_log(q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the logarithm, that of the smallest normal number for smaller ones: finite, and exact down to e^-87."""
    return q.clamp(min=torch.finfo(q.dtype).tiny).log()


class KLTerms(torch.autograd.Function):
    """`kl_terms`; a term whose upstream gradient is 0 has no gradient, however infinite it is."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Return the terms."""
        p = log_p.exp()
        empty = p == 0
        difference = log_p.masked_fill(empty, 0.0) - log_q.masked_fill(empty, 0.0)
        ctx.save_for_backward(p, difference)
        return p * difference

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return `p (log p - log q + 1)` and `-p`."""
        p, difference = ctx.saved_tensors
        of_p, of_q = None, None
        if ctx.needs_input_grad[0]:
            # 0 * inf would be NaN: what a mask leaves out has no gradient.
            of_p = (upstream * p * (difference + 1)).masked_fill(upstream == 0, 0.0)
        if ctx.needs_input_grad[1]:
            of_q = -upstream * p
        return of_p, of_q


def kl_terms(log_p: Float[Tensor, "*shape"], log_q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute `p (log p - log q)` elementwise, with `0 * -inf = 0` in value and gradient.

    What a mask leaves out passes no gradient on, not even of infinite terms.

    Args:
        log_p: Log-probabilities of the distribution that weighs the terms; may hold `-inf`.
        log_q: Log-probabilities of the other one.
    """
    terms: Tensor = KLTerms.apply(log_p, log_q)  # type: ignore[no-untyped-call]  # torch leaves it bare
    return terms


def bernoulli_kl(log_a: Float[Tensor, "*shape"], log_b: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute `KL(Bernoulli(a) || Bernoulli(b))` in nats; `0 * -inf = 0`.

    Args:
        log_a: Log-probabilities of success.
        log_b: Likewise.
    """
    # At log p = 0 the other outcome has log-probability -inf: a side that is certain would cost the other infinity.
    log_a, log_b = log_a.clamp(max=-EPSILON), log_b.clamp(max=-EPSILON)
    # log(1 - p) through expm1: 1 - exp(log p) loses all digits where p is near 1, and with tau = 100 it always is.
    not_a, not_b = (torch.log(-torch.expm1(log_p)) for log_p in (log_a, log_b))
    return kl_terms(log_a, log_b) + kl_terms(not_a, not_b)


class Op(nn.Module):
    """A backend of an op: a function of tensors, called like the op's reference and without state."""

    def forward_fp32(self, *inputs: Any, **named: Any) -> Any:
        """Compute the same as `forward`, with the same arguments, in float32 (float64 stays): the ground truth."""
        raised = (upcast(x) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)
        return self.forward(*raised, **named)
