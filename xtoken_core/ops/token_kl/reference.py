"""The reference of `token_kl`, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from xtoken_core.ops.cross_entropy.reference import cross_entropy
from xtoken_core.ops.numerics import Op, kl_terms, upcast


@dataclass(frozen=True)
class TokenKLOptions:
    """Options of `token_kl`.

    Attributes:
        vocab_size: `V`: both heads are cut to it, each side renormalised.
        temperature: `T`.
        reverse: KL of the student against the teacher instead.
        overwrite: True if a backend may overwrite the student's logits with their gradient.
    """

    vocab_size: int
    temperature: float = 1.0
    reverse: bool = False
    overwrite: bool = False


class TokenKLResult(NamedTuple):
    """Results of `token_kl` per position.

    Attributes:
        kl: The divergence in nats, without the factor `T^2`.
        agrees: True if both sides' largest logit is that of the same token.
        losses: Cross-entropy on the whole head, in nats.
        hits: True where the target has the largest logit.
    """

    kl: Float[Tensor, "B T"]
    agrees: Bool[Tensor, "B T"]
    losses: Float[Tensor, "B T"]
    hits: Bool[Tensor, "B T"]


def token_kl(
    student_logits: Float[Tensor, "B T V_head"],
    teacher_logits: Float[Tensor, "B T V_m"],
    targets: Int[Tensor, "B T"],
    options: TokenKLOptions,
) -> TokenKLResult:
    """Compute the KL of every position's next-token distributions, and the student's cross-entropy.

    With `p = softmax(z_t[:V] / T)` and `q = softmax(z_s[:V] / T)` it is `sum p (log p - log q)`, reversed
    `sum q (log q - log p)`; `0 * -inf = 0`. Ties of the largest logit count for the lowest id.

    Args:
        student_logits: The whole head.
        teacher_logits: At least `V` wide; no gradient is wanted for it.
        targets: The id that each position predicts, in `[0, V_head)`.
        options: Settings of the comparison.
    """
    whole, V = upcast(student_logits), options.vocab_size  # both gradients are added before they are rounded
    sides = whole[..., :V], upcast(teacher_logits.detach())[..., :V]
    log_q, log_p = (torch.log_softmax(logits / options.temperature, dim=-1) for logits in sides)
    terms = kl_terms(log_q, log_p) if options.reverse else kl_terms(log_p, log_q)  # [B, T, V]
    agrees = log_q.detach().argmax(-1) == log_p.argmax(-1)
    return TokenKLResult(terms.sum(-1), agrees, *cross_entropy(whole, targets))


class NativeTokenKLOp(Op):
    """Reference backend: float32 inside from the first operation on; the gradient in the logits' dtype."""

    forward = staticmethod(token_kl)
