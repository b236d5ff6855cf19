"""Compatibility surface: a name of the public loss utilities that the pipeline itself does not call.

The others are defined where they belong (operators, projection, alignment, transports), and offered under their public
path `xtoken_core.losses` by the stub of that package.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Num
from torch import Tensor


def dp_all_reduce_sum(local: Num[Tensor, ""]) -> Tensor:
    """Sum a scalar over the default process group, which holds the data-parallel ranks.

    Args:
        local: This rank's count, any dtype; not modified.

    Returns:
        A fresh float32 scalar; a copy of `local` where `torch.distributed` is not initialised.
    """
    total = local.detach().to(torch.float32, copy=True)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total
