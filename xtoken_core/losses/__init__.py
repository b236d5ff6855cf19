"""The distillation losses: which positions and chunks count, what is compared, how parts and teachers are weighed.

One file per loss over `common` and `masks`; `combine` holds the one public loss. Formulas over tensors are the ops',
files and caches the projection's; their names are offered here as well. Names are imported when first used, so that a
light module of this folder can be imported by itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xtoken_core.alignment import alignment_from_flat_batch as alignment_from_flat_batch
    from xtoken_core.losses.blocks import TokenBlocks as TokenBlocks
    from xtoken_core.losses.combine import CrossTokenizerDistillationLoss as CrossTokenizerDistillationLoss
    from xtoken_core.losses.combine import combine_metrics as combine_metrics
    from xtoken_core.losses.common import LossTeacher as LossTeacher
    from xtoken_core.losses.distributed import dp_all_reduce_sum as dp_all_reduce_sum
    from xtoken_core.losses.exact_map import exact_token_map as exact_token_map
    from xtoken_core.losses.heads import HeadProjection as HeadProjection
    from xtoken_core.losses.masks import ce_token_counts as ce_token_counts
    from xtoken_core.losses.masks import kd_chunk_counts as kd_chunk_counts
    from xtoken_core.losses.masks import shifted_chunk_ids as shifted_chunk_ids
    from xtoken_core.losses.masks import valid_chunk_mask as valid_chunk_mask
    from xtoken_core.ops.chunk_mean import chunk_average_log_probs as chunk_average_log_probs
    from xtoken_core.ops.sparse_projection import Fp32SparseMM as Fp32SparseMM
    from xtoken_core.projection import _EXACT_TOKEN_MAP_CACHE as _EXACT_TOKEN_MAP_CACHE
    from xtoken_core.projection import _SPARSE_PROJECTION_CACHE as _SPARSE_PROJECTION_CACHE
    from xtoken_core.projection import _TOPK_PROJECTION_CACHE as _TOPK_PROJECTION_CACHE
    from xtoken_core.projection import build_exact_token_map as build_exact_token_map
    from xtoken_core.projection import get_sparse_projection_matrix as get_sparse_projection_matrix
    from xtoken_core.projection import get_topk_projection as get_topk_projection
    from xtoken_core.projection import parse_projection_file as parse_projection_file
    from xtoken_core.transports.signal import (
        rebuild_teacher_full_logits_from_ipc as rebuild_teacher_full_logits_from_ipc,
    )

_EXPORTS = {
    "CrossTokenizerDistillationLoss": "xtoken_core.losses.combine",
    "Fp32SparseMM": "xtoken_core.ops.sparse_projection",
    "HeadProjection": "xtoken_core.losses.heads",
    "LossTeacher": "xtoken_core.losses.common",
    "TokenBlocks": "xtoken_core.losses.blocks",
    "_EXACT_TOKEN_MAP_CACHE": "xtoken_core.projection",
    "_SPARSE_PROJECTION_CACHE": "xtoken_core.projection",
    "_TOPK_PROJECTION_CACHE": "xtoken_core.projection",
    "alignment_from_flat_batch": "xtoken_core.alignment",
    "build_exact_token_map": "xtoken_core.projection",
    "ce_token_counts": "xtoken_core.losses.masks",
    "chunk_average_log_probs": "xtoken_core.ops.chunk_mean",
    "combine_metrics": "xtoken_core.losses.combine",
    "dp_all_reduce_sum": "xtoken_core.losses.distributed",
    "exact_token_map": "xtoken_core.losses.exact_map",
    "get_sparse_projection_matrix": "xtoken_core.projection",
    "get_topk_projection": "xtoken_core.projection",
    "kd_chunk_counts": "xtoken_core.losses.masks",
    "parse_projection_file": "xtoken_core.projection",
    "rebuild_teacher_full_logits_from_ipc": "xtoken_core.transports.signal",
    "shifted_chunk_ids": "xtoken_core.losses.masks",
    "valid_chunk_mask": "xtoken_core.losses.masks",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value
