"""`embedding`: rows of a table by token id."""

from xtoken_core.ops.embedding.reference import NativeEmbeddingOp

__all__ = ["NativeEmbeddingOp"]
