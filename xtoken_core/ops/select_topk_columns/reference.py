"""The reference of `select_topk_columns`, in plain PyTorch."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.ops.numerics import Op


def largest_columns(maxima: Float[Tensor, " V"], k: int) -> Int[Tensor, " K"]:
    """Return the ids of the `k` largest values, ascending; of equal values at the border the lowest ids.

    Args:
        maxima: One value per column; NaN counts as the largest.
        k: How many; all of them if there are fewer.
    """
    order = torch.sort(maxima, descending=True, stable=True).indices
    return order[: min(k, maxima.shape[0])].sort().values


def select_topk_columns(logits: Float[Tensor, "*rows V"], k: int) -> Int[Tensor, " K"]:
    """Return the `k` columns with the largest maximum over all rows, ascending; ties go to the lowest id.

    Args:
        logits: Rows of logits, already cut to the columns that may be chosen.
        k: How many columns; all of them if `k >= V`.

    Returns:
        `min(k, V)` ids, int64. No gradient.
    """
    V = logits.shape[-1]
    if k >= V:
        return torch.arange(V, device=logits.device)
    return largest_columns(logits.detach().reshape(-1, V).amax(dim=0), k)


class NativeSelectTopkColumnsOp(Op):
    """Reference backend. Comparing is exact in every dtype, so both paths give the same ids."""

    forward = staticmethod(select_topk_columns)
