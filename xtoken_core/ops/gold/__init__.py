"""`gold`: KL over the tokens two vocabularies share, sorted L1 over the rest, chunk by chunk.

`gold_cross_entropy` is the same together with the student's cross-entropy, for one gradient of both.
"""

from xtoken_core.ops.gold.reference import (
    GoldCrossEntropyResult,
    GoldOptions,
    GoldResult,
    NativeGoldCrossEntropyOp,
    NativeGoldOp,
    TokenPartition,
    gold,
    gold_cross_entropy,
)

__all__ = [
    "GoldCrossEntropyResult",
    "GoldOptions",
    "GoldResult",
    "NativeGoldCrossEntropyOp",
    "NativeGoldOp",
    "TokenPartition",
    "gold",
    "gold_cross_entropy",
]
