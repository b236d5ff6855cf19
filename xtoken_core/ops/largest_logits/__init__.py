"""`largest_logits`: the largest logits of every position, its log-normalisers and the mass of all other tokens."""

from xtoken_core.ops.largest_logits.reference import LargestLogits, NativeLargestLogitsOp, largest_logits

__all__ = ["LargestLogits", "NativeLargestLogitsOp", "largest_logits"]
