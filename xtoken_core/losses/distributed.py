"""Counts that belong to a whole step, added over the data-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Num
from torch import Tensor


def dp_all_reduce_sum(local: Num[Tensor, ""]) -> Tensor:
    """The sum of a scalar over the default process group, which holds the data-parallel ranks.

    Args:
        local: This rank's count, any dtype; not modified.

    Returns:
        A fresh float32 scalar; a copy of `local` where `torch.distributed` is not initialised.
    """
    total = local.detach().to(torch.float32, copy=True)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total
