"""The reference of `indices_to_multihot`, in plain PyTorch."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from xtoken_core.ops.numerics import Op


def winning_slots(indices: Int[Tensor, "T k"], num_experts: int) -> Bool[Tensor, "T k"]:
    """Return True at the slots that count: those of a real expert that no higher slot of the row names again.

    Args:
        indices: Experts of each token; anything outside `[0, num_experts)` is none.
        num_experts: `E`.
    """
    k = indices.shape[1]
    inside = (indices >= 0) & (indices < num_experts)
    slot = torch.arange(k, device=indices.device)
    later = slot.unsqueeze(0) > slot.unsqueeze(1)  # [k, k]: column after row
    repeated = (indices.unsqueeze(2) == indices.unsqueeze(1)) & later  # [T, k, k]
    return inside & ~repeated.any(dim=2)


def indices_to_multihot(
    indices: Int[Tensor, "T k"], probs: Float[Tensor, "T k"], num_experts: int
) -> tuple[Bool[Tensor, "T E"], Float[Tensor, "T E"]]:
    """Spread each token's chosen experts over all experts.

    A duplicated expert takes the highest slot's probability; the losing slots and those of no expert get gradient 0.

    Args:
        indices: Experts of each token; anything outside `[0, num_experts)` is none.
        probs: Their probabilities.
        num_experts: `E`.

    Returns:
        Which experts were chosen, and their probabilities, 0 elsewhere.
    """
    wins = winning_slots(indices, num_experts)
    target = indices.long().masked_fill(~wins, num_experts)
    shape = (indices.shape[0], num_experts + 1)
    multihot = torch.zeros(shape, dtype=torch.bool, device=indices.device).scatter(1, target, True)
    spread = torch.zeros(shape, dtype=probs.dtype, device=probs.device).scatter(
        1, target, probs.masked_fill(~wins, 0.0)
    )
    return multihot[:, :num_experts], spread[:, :num_experts]


class NativeIndicesToMultihotOp(Op):
    """Reference backend: moves values, so both paths agree exactly."""

    forward = staticmethod(indices_to_multihot)
