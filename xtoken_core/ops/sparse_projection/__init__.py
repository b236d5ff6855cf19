"""`sparse_projection`: probabilities over the student's vocabulary, carried over to the teacher's."""

from xtoken_core.ops.sparse_projection.matrix import ProjectionMatrix
from xtoken_core.ops.sparse_projection.reference import Fp32SparseMM, NativeSparseProjectionOp

__all__ = ["Fp32SparseMM", "NativeSparseProjectionOp", "ProjectionMatrix"]
