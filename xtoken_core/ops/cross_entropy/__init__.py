"""`cross_entropy`: the negative log-likelihood of each position's target, and whether it was the first guess."""

from xtoken_core.ops.cross_entropy.reference import NativeCrossEntropyOp, cross_entropy

__all__ = ["NativeCrossEntropyOp", "cross_entropy"]
