"""The distillation losses: which positions and chunks count, what is compared, how parts and teachers are weighed.

One file per loss over `common` and `masks`; `combine` holds the one public loss. Formulas over tensors are the ops'.
Names are imported when first used, so that a light module of this folder can be imported by itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xtoken_core.losses.combine import CrossTokenizerDistillationLoss as CrossTokenizerDistillationLoss
    from xtoken_core.losses.combine import combine_metrics as combine_metrics
    from xtoken_core.losses.common import LossTeacher as LossTeacher
    from xtoken_core.losses.distributed import dp_all_reduce_sum as dp_all_reduce_sum
    from xtoken_core.losses.exact_map import exact_token_map as exact_token_map
    from xtoken_core.losses.masks import ce_token_counts as ce_token_counts
    from xtoken_core.losses.masks import kd_chunk_counts as kd_chunk_counts
    from xtoken_core.losses.masks import shifted_chunk_ids as shifted_chunk_ids
    from xtoken_core.losses.masks import valid_chunk_mask as valid_chunk_mask
    from xtoken_core.ops.chunk_mean import chunk_average_log_probs as chunk_average_log_probs
    from xtoken_core.ops.sparse_projection import Fp32SparseMM as Fp32SparseMM

_EXPORTS = {
    "CrossTokenizerDistillationLoss": "xtoken_core.losses.combine",
    "Fp32SparseMM": "xtoken_core.ops.sparse_projection",
    "LossTeacher": "xtoken_core.losses.common",
    "ce_token_counts": "xtoken_core.losses.masks",
    "chunk_average_log_probs": "xtoken_core.ops.chunk_mean",
    "combine_metrics": "xtoken_core.losses.combine",
    "dp_all_reduce_sum": "xtoken_core.losses.distributed",
    "exact_token_map": "xtoken_core.losses.exact_map",
    "kd_chunk_counts": "xtoken_core.losses.masks",
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
