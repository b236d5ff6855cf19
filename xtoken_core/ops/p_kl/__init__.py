"""`p_kl`: KL between a teacher's chunks and a student's, projected onto the teacher's vocabulary.

`p_kl_cross_entropy` is the same together with the student's cross-entropy, for one gradient of both.
"""

from xtoken_core.ops.p_kl.reference import (
    NativePKLCrossEntropyOp,
    NativePKLOp,
    PKLCrossEntropyResult,
    PKLOptions,
    PKLResult,
    p_kl,
    p_kl_cross_entropy,
)

__all__ = [
    "NativePKLCrossEntropyOp",
    "NativePKLOp",
    "PKLCrossEntropyResult",
    "PKLOptions",
    "PKLResult",
    "p_kl",
    "p_kl_cross_entropy",
]
