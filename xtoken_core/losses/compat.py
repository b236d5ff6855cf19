"""Compatibility surface: names of the public loss utilities that the pipeline itself does not call.

Most are defined where they belong (operators, projection, alignment, transports) and offered here under their public
path `xtoken_core.losses`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Num
from torch import Tensor

from xtoken_core.alignment import alignment_from_flat_batch
from xtoken_core.ops.chunk_mean.reference import chunk_average_log_probs
from xtoken_core.ops.sparse_projection.reference import Fp32SparseMM
from xtoken_core.projection.compat import (
    _EXACT_TOKEN_MAP_CACHE,
    _SPARSE_PROJECTION_CACHE,
    _TOPK_PROJECTION_CACHE,
    build_exact_token_map,
    get_sparse_projection_matrix,
    get_topk_projection,
)
from xtoken_core.projection.exact_map import exact_token_map
from xtoken_core.projection.files import parse_projection_file
from xtoken_core.transports.compat import rebuild_teacher_full_logits_from_ipc

__all__ = [
    "_EXACT_TOKEN_MAP_CACHE",
    "_SPARSE_PROJECTION_CACHE",
    "_TOPK_PROJECTION_CACHE",
    "Fp32SparseMM",
    "alignment_from_flat_batch",
    "build_exact_token_map",
    "chunk_average_log_probs",
    "dp_all_reduce_sum",
    "exact_token_map",
    "get_sparse_projection_matrix",
    "get_topk_projection",
    "parse_projection_file",
    "rebuild_teacher_full_logits_from_ipc",
]


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
