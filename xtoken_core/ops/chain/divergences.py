"""The divergence of two distributions over the classes of a node: forward KL, and other forms on generated text.

A term of a node weighs 1 because the text visits the node as often as its source does. On given text the source is not
the student, so that only the forward KL is exact; text that the student has generated visits nodes as the student does,
where the reverse KL and the generalised JSD (Agarwal et al. 2023, arXiv 2306.13649) are exact.

`p` is the teacher's mass by class and `q` the student's, over the classes that both can have, with sums `m` and `s`:
each can lack a part, on classes that the other one cannot have.

- forward: `m KL(p / m || q)`
- reverse: `KL(q / s || p / m) - log s`; the student's mass beyond `s` costs as much as in the forward direction
- JSD: `beta KL(p / m || M) + (1 - beta) KL(q || M)` with `M = beta p / m + (1 - beta) q`, and one more class of the
  student's mass beyond `s`
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from xtoken_core.ops.numerics import floored_log


class Generated(NamedTuple):
    """The form of the divergence on text that the student has generated.

    Attributes:
        at: `[B, T_s]` for positions or `[E]` for comparisons: True where the text is the student's own.
        beta: Weight of the teacher in the generalised JSD; None: reverse KL.
    """

    at: Tensor
    beta: float | None = None

    def of_rows(self, rows: Tensor) -> Generated:
        """Return the form of some comparisons.

        Args:
            rows: Index of each one's position in the flattened `[B, T_s]`.
        """
        return Generated(self.at.flatten()[rows], self.beta)


class Classes(NamedTuple):
    """Sums over the classes of each comparison.

    Attributes:
        total: From values by class to their sum per comparison.
        spread: From a value per comparison to one by class.
    """

    total: Callable[[Tensor], Tensor]
    spread: Callable[[Tensor], Tensor]


DENSE = Classes(lambda x: x.sum(1), lambda x: x.unsqueeze(1))
"""Classes in the second of two dimensions."""


def node_divergence(p: Tensor, q: Tensor, classes: Classes, generated: Generated | None) -> Float[Tensor, " E"]:
    """Compute the divergence of every comparison.

    Args:
        p: The teacher's mass by class, no gradient or only the student's classes' one.
        q: The student's, with a gradient.
        classes: How the classes are laid out.
        generated: The form on generated text; None: all text is given.
    """
    total, spread = classes
    forward = total(xlogy(p) - p * floored_log(q)) - xlogy(total(p))
    if generated is None:
        return forward
    tiny = torch.finfo(p.dtype).tiny
    mass, reachable = total(p), total(q)
    of_teacher = p / spread(mass.clamp(min=tiny))
    # Reverse: KL(q / s || p / m) - log s.
    if generated.beta is None:
        floored = reachable.clamp(min=tiny)
        cost = total(q * (floored_log(q) - floored_log(p))) / floored
        other = cost - 2 * floored.log() + floored_log(mass)
    else:
        other = _jsd(of_teacher, q, reachable, total, generated.beta)
    # Without a class that both can have there is nothing to compare.
    other = torch.where((mass > 0) & (reachable > 0), other, 0.0)
    return torch.where(generated.at, other, forward)


def _jsd(p: Tensor, q: Tensor, reachable: Tensor, total: Callable[[Tensor], Tensor], beta: float) -> Tensor:
    """Compute the generalised JSD of a distribution and one whose mass beyond `reachable` the first cannot have."""
    mixture = floored_log(beta * p + (1 - beta) * q)
    of_teacher, of_student = (total(x * (floored_log(x) - mixture)) for x in (p, q))
    # Of the student's mass beyond `reachable` the mixture has (1 - beta) q: log(q / ((1 - beta) q)) = -log(1 - beta).
    beyond = (1 - reachable).clamp(min=0.0) * -math.log1p(-beta)
    return beta * of_teacher + (1 - beta) * (of_student + beyond)


def xlogy(p: Tensor) -> Tensor:
    """Return `p log p`, 0 for 0."""
    return torch.xlogy(p, p)
