"""`p_kl`: KL between a teacher's chunks and a student's, projected onto the teacher's vocabulary."""

from xtoken_core.ops.p_kl.reference import NativePKLOp, PKLOptions, PKLResult, p_kl

__all__ = ["NativePKLOp", "PKLOptions", "PKLResult", "p_kl"]
