"""`embedding`: rows of a table by token id."""

from xtoken_core.compat.embedding.reference import NativeEmbeddingOp

__all__ = ["NativeEmbeddingOp"]
