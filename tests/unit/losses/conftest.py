"""Checks the shapes and dtypes that the annotations of losses and ops promise while these tests run."""

from jaxtyping import install_import_hook

# Not the kernels: Triton compiles their source and cannot read a wrapped function.
OPS = ("embedding", "indices_to_multihot", "sparse_projection", "select_topk_columns", "chunk_mean")
MODULES = [
    f"xtoken_core.ops.{op}.{part}" for op in (*OPS, "cross_entropy", "p_kl", "gold") for part in ("reference", "triton")
]

install_import_hook(
    [*MODULES, "xtoken_core.losses", "xtoken_core.ops.numerics", "xtoken_core.ops.chunks"], "beartype.beartype"
)
