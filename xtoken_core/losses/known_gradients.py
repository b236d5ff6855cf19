"""Losses whose gradients are computed with their values; backward scales them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtoken_core.losses.masks import next_token_targets
from xtoken_core.losses.objective import ComparedTeacher, Metrics, Objective, Values, evaluate_whole
from xtoken_core.ops.scaling import scale_

FIRST = 1 << 16
"""Numbers of a sum that are rounded by way of a copy."""

Computed = Tensor | tuple[Tensor, Tensor] | None
"""A gradient; a wide sum for a narrower operand in two parts along the first dimension; None where none is wanted."""


def halved(rows: int) -> tuple[int, int]:
    """Return the rows of both parts of a sum; the first, with two bytes a number, holds all numbers of one byte less.

    >>> halved(128_256)
    (64128, 64128)
    """
    first = min(rows, -(-rows // 128) * 64)  # aligned, for the matrix product of each part
    return first, rows - first


def cross_entropy_alone(
    batch: Mapping[str, Tensor],
    student_logits: Float[Tensor, "B T_s V_head"],
    teachers: Sequence[ComparedTeacher],
    objective: Objective,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Compute a linear loss that trains on the cross-entropy only, its metrics, and the gradient in the same pass.

    Args:
        batch: Holds the student's own tokens.
        student_logits: The whole head; they require a gradient.
        teachers: The teachers it is compared with, for the metrics.
        objective: The loss as a function of the values.
    """
    leaf = student_logits.detach().requires_grad_()
    with torch.no_grad():
        upstream = objective.upstream(Values.zeros(teachers, next_token_targets(batch), leaf.dtype))[-1]
    with torch.enable_grad():
        values = evaluate_whole(batch, leaf, teachers, trains_on_kd=False, of_losses=upstream)
    gradients = torch.autograd.grad(values.losses, leaf, upstream)
    with torch.no_grad():
        loss, metrics = objective(values.detached())
    return with_gradients([student_logits], loss, gradients), metrics


def with_gradients(
    operands: Sequence[Tensor | None], value: Float[Tensor, ""], gradients: Sequence[Computed]
) -> Float[Tensor, ""]:
    """Return the value with the operands' gradients; it can be differentiated once.

    Args:
        operands: What it is a function of.
        value: The value.
        gradients: One for each operand, in float32 where the operand's dtype is narrower and they are in two parts.
    """
    result: Tensor = _WithGradients.apply(value, gradients, *operands)  # type: ignore[no-untyped-call]  # torch leaves it bare
    return result


class _WithGradients(torch.autograd.Function):
    """A scalar with precomputed gradients: backward scales them in place, so it can run only once."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Computed], *operands: Tensor | None) -> Tensor:
        """Return the value."""
        ctx.gradients = gradients
        ctx.dtypes = [None if x is None else x.dtype for x in operands]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, scaled, in the dtypes of the operands.

        Raises:
            RuntimeError: They have been returned before.
        """
        if ctx.gradients is None:
            raise RuntimeError("this loss can be differentiated once, since backward reuses its memory: call it again")
        # Released at once, and scaled in place: a second [V, H] may not fit.
        gradients, ctx.gradients = ctx.gradients, None
        pairs = zip(gradients, ctx.dtypes, strict=True)
        return None, None, *(None if x is None else _scaled(x, upstream, dtype) for x, dtype in pairs)


def _scaled(x: Tensor | tuple[Tensor, Tensor], factor: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(x, tuple):
        return _rounded(*x, factor.float(), dtype)
    # In float32 at least: the scale of a loss may be beyond what a half-precision gradient can hold.
    factor = factor.to(torch.promote_types(x.dtype, torch.float32))
    return scale_(x, factor) if x.dtype == dtype else torch.mul(x, factor, out=x.new_empty(x.shape, dtype=dtype))


def _rounded(first: Tensor, second: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return both parts scaled in a dtype of half the size, in the memory of the first."""
    wide, rows = first.flatten(), len(first) + len(second)
    narrow = first.view(dtype).flatten()[: rows * first.shape[1]]
    # Numbers from `begin` to `2 * begin` are written where those before them were read.
    end = min(FIRST, len(wide))
    narrow[:end] = wide[:end] * factor
    while end < len(wide):
        begin, end = end, min(2 * end, len(wide))
        torch.mul(wide[begin:end], factor, out=narrow[begin:end])
    torch.mul(second.flatten(), factor, out=narrow[len(wide) :])
    return narrow.view(rows, -1)
