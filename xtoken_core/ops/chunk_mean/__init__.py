"""`chunk_mean`: the mean of per-token rows over each chunk of aligned tokens."""

from xtoken_core.ops.chunk_mean.reference import NativeChunkMeanOp, chunk_average_log_probs, chunk_sizes

__all__ = ["NativeChunkMeanOp", "chunk_average_log_probs", "chunk_sizes"]
