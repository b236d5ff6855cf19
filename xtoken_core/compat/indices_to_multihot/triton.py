"""The Triton backend of `indices_to_multihot`."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtoken_core.compat.indices_to_multihot.kernels import _indices_to_multihot_kernel, _multihot_to_indices_kernel
from xtoken_core.ops.numerics import Op
from xtoken_core.ops.triton_support import launching_on, power_of_2

TILE = 512
"""Entries that a program of the forward spreads."""
SLOT_TILE = 128
"""Slots of a program of the backward."""


class IndicesToMultihot(torch.autograd.Function):
    """Spread a token's chosen experts over all experts; the backward gathers by the saved indices."""

    @staticmethod
    def forward(
        ctx: Any, indices: Int[Tensor, "T k"], probs_indices: Float[Tensor, "T k"], num_of_local_experts: int
    ) -> tuple[Bool[Tensor, "T E"], Float[Tensor, "T E"]]:
        """Compute the same as `fused_indices_to_multihot`."""
        indices, probs_indices = indices.contiguous(), probs_indices.contiguous()
        T, k = indices.shape
        E = num_of_local_experts
        multihot = torch.empty((T, E), dtype=torch.bool, device=indices.device)
        probs = torch.empty((T, E), dtype=probs_indices.dtype, device=indices.device)
        block = max(1, TILE // power_of_2(E))  # tokens of a program
        words = power_of_2(triton.cdiv(E, 32))  # of 32 bits, for a row of experts
        with launching_on(probs_indices):
            if T and E:
                _indices_to_multihot_kernel[(triton.cdiv(T, block),)](
                    indices, probs_indices, multihot, probs, T, E, k, power_of_2(k), words, block, TILE, num_warps=1
                )
        ctx.save_for_backward(indices)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(multihot)
        return multihot, probs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_multihot_indices: Tensor | None, grad_probs_in_multihot: Float[Tensor, "T E"] | None
    ) -> tuple[None, Float[Tensor, "T k"] | None, None]:
        """Return the gradient of each slot's probability; that of the indicator does not exist."""
        (indices,) = ctx.saved_tensors
        if grad_probs_in_multihot is None:
            return None, None, None
        gradient = grad_probs_in_multihot.contiguous()
        T, k = indices.shape
        E = gradient.shape[1]
        slots = torch.empty((T, k), dtype=gradient.dtype, device=gradient.device)
        width = power_of_2(k)
        block = max(1, SLOT_TILE // width)
        if T and k:
            _multihot_to_indices_kernel[(triton.cdiv(T, block),)](
                gradient, indices, slots, T, E, k, width, block, num_warps=2
            )
        return None, slots, None


def fused_indices_to_multihot(
    indices: Int[Tensor, "T k"], probs_indices: Float[Tensor, "T k"], num_of_local_experts: int
) -> tuple[Bool[Tensor, "T E"], Float[Tensor, "T E"]]:
    """Spread each token's chosen experts over all experts.

    Args:
        indices: int32 or int64 experts of each token; -1 and anything beyond the experts is none; of a duplicated
            expert the highest slot counts.
        probs_indices: Their probabilities, float32, bfloat16 or float16.
        num_of_local_experts: `E`.

    Returns:
        Which experts were chosen, and their probabilities, 0 elsewhere.

    Raises:
        ConfigError: The tensors are on the CPU and Triton's interpreter is off.
    """
    result: tuple[Tensor, Tensor] = IndicesToMultihot.apply(indices, probs_indices, num_of_local_experts)  # type: ignore[no-untyped-call]  # torch leaves it bare
    return result


class TritonIndicesToMultihotOp(Op):
    """Triton backend: moves values, so it equals the reference bit for bit, backward included."""

    forward = staticmethod(fused_indices_to_multihot)
