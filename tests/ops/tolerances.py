"""How far an op may be from its float32 reference: the one table, by family and dtype.

A pair is (relative to the reference's largest magnitude, absolute). Families: `move` ops only move values; `gather`
ops too, but their gradient adds rows, in the reference in the table's own dtype; `row` ops reduce over a row; `chunk`
ops also average over a chunk. `bfloat16` and `float16` are dtypes of the inputs: the
reference sees the same rounded inputs, upcast.
"""

import torch
from torch import Tensor

FAMILY = {
    "embedding": "gather",
    "indices_to_multihot": "move",
    "select_topk_columns": "move",
    "sparse_projection": "row",
    "cross_entropy": "row",
    "largest_logits": "row",
    "token_kl": "row",
    "chunk_mean": "chunk",
    "p_kl": "chunk",
    "p_kl_cross_entropy": "chunk",
    "chain": "chunk",
    "chain_topk": "chunk",
    "gold": "chunk",
    "gold_cross_entropy": "chunk",
}

INTERPRETER_SLACK = 2.0
"""Triton's interpreter cuts float32 off to bfloat16 instead of rounding: twice the error."""

OUTPUT = {
    ("gather", torch.float32): (0.0, 0.0),
    ("gather", torch.bfloat16): (0.0, 0.0),
    ("gather", torch.float16): (0.0, 0.0),
    ("move", torch.float32): (0.0, 0.0),
    ("move", torch.bfloat16): (0.0, 0.0),
    ("move", torch.float16): (0.0, 0.0),
    ("row", torch.float32): (1e-6, 1e-7),
    ("row", torch.bfloat16): (4e-3, 1e-7),
    ("row", torch.float16): (5e-4, 1e-7),
    ("chunk", torch.float32): (5e-6, 1e-7),
    ("chunk", torch.bfloat16): (4e-3, 1e-7),
    ("chunk", torch.float16): (5e-4, 1e-7),
}

GRADIENT = {
    ("gather", torch.float32): (1e-6, 1e-7),
    ("gather", torch.bfloat16): (2e-2, 1e-7),
    ("gather", torch.float16): (2e-3, 1e-6),
    ("move", torch.float32): (1e-6, 1e-7),
    ("move", torch.bfloat16): (4e-3, 1e-7),
    ("move", torch.float16): (5e-4, 1e-7),
    ("row", torch.float32): (1e-6, 1e-7),
    ("row", torch.bfloat16): (4e-3, 1e-7),
    ("row", torch.float16): (5e-4, 1e-6),
    ("chunk", torch.float32): (1e-5, 1e-7),
    ("chunk", torch.bfloat16): (4e-3, 1e-7),
    ("chunk", torch.float16): (5e-4, 1e-6),
}


def assert_within(
    actual: Tensor, expected: Tensor, bound: tuple[float, float], what: str, *, slack: float = 1.0
) -> None:
    """The largest difference is at most `slack * (relative * largest magnitude + absolute)`."""
    if not expected.is_floating_point():
        assert torch.equal(actual, expected), what
        return
    difference = (actual.double() - expected.double()).abs().max().item() if expected.numel() else 0.0
    largest = expected.double().abs().max().item() if expected.numel() else 0.0
    allowed = slack * (bound[0] * largest + bound[1])
    assert difference <= allowed, f"{what}: {difference:.3g} > {allowed:.3g}"
