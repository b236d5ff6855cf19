"""Without a GPU the kernels run in Triton's interpreter; annotations of the ops are checked throughout."""

import os

import torch
from jaxtyping import install_import_hook

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Not the kernels: Triton compiles their source and cannot read a wrapped function.
OPS = ("embedding", "indices_to_multihot", "sparse_projection", "select_topk_columns", "largest_logits", "chunk_mean")
MODULES = [
    f"xtoken_core.ops.{op}.{part}" for op in (*OPS, "cross_entropy", "p_kl", "gold") for part in ("reference", "triton")
]

install_import_hook(
    [*MODULES, "xtoken_core.losses", "xtoken_core.ops.numerics", "xtoken_core.ops.chunks"], "beartype.beartype"
)
