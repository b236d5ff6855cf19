"""The reference of `chunk_mean`, in plain PyTorch."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.ops.numerics import EPSILON, Op, upcast


def chunk_sizes(chunk_id: Int[Tensor, "B T"], max_chunks: int) -> Float[Tensor, "B P"]:
    """Return the number of positions of each chunk, as float32.

    Args:
        chunk_id: Chunk of each position; a value outside `[0, max_chunks)` means none.
        max_chunks: `P`, the number of chunks.
    """
    buckets = _buckets(chunk_id, max_chunks)
    sizes = torch.zeros(chunk_id.shape[0], max_chunks + 1, device=chunk_id.device)
    return sizes.scatter_add(1, buckets, torch.ones_like(buckets, dtype=sizes.dtype))[:, :max_chunks]


def chunk_average_log_probs(
    log_probs: Float[Tensor, "B T V"], chunk_id: Int[Tensor, "B T"], max_chunks: int
) -> tuple[Float[Tensor, "B P V"], Float[Tensor, "B P"]]:
    """Compute each chunk's sum of `log_probs` over its positions, divided by (their number + 1e-10).

    Positions are added one after the other, so a chunk's mean does not depend on what else is in the batch.

    Args:
        log_probs: One row per position; any values, not only log-probabilities.
        chunk_id: Chunk of each position; anything outside `[0, max_chunks)` belongs to none.
        max_chunks: `P`, the number of chunks.

    Returns:
        The means, in the dtype of `log_probs`, and the chunks' sizes as float32.
    """
    x = log_probs
    B, T, V = x.shape
    buckets = _buckets(chunk_id, max_chunks)  # [B, T]; bucket P of each sample collects positions of no chunk
    rows = buckets + torch.arange(B, device=x.device).unsqueeze(1) * (max_chunks + 1)
    sums = torch.zeros(B * (max_chunks + 1), V, dtype=x.dtype, device=x.device)
    rows, x = rows.reshape(B * T), x.reshape(B * T, V)
    # On CUDA index_add is atomic, an accumulating index_put sorts first.
    sums = sums.index_put((rows,), x, accumulate=True) if x.is_cuda else sums.index_add(0, rows, x)
    sizes = chunk_sizes(chunk_id, max_chunks)
    divisor = (sizes.to(x.dtype) + EPSILON).unsqueeze(-1)
    return sums.view(B, max_chunks + 1, V)[:, :max_chunks] / divisor, sizes


def _buckets(chunk_id: Tensor, max_chunks: int) -> Tensor:
    outside = (chunk_id < 0) | (chunk_id >= max_chunks)
    return chunk_id.long().masked_fill(outside, max_chunks)


class NativeChunkMeanOp(Op):
    """Reference backend: float32 inside, the result in the input's dtype."""

    def forward(
        self, x: Float[Tensor, "B T V"], chunk_id: Int[Tensor, "B T"], max_chunks: int
    ) -> tuple[Float[Tensor, "B P V"], Float[Tensor, "B P"]]:
        """Compute `chunk_average_log_probs`, accumulated in float32 and rounded once to the dtype of `x`."""
        means, sizes = chunk_average_log_probs(upcast(x), chunk_id, max_chunks)
        return means.to(x.dtype), sizes
