"""The launch of the kernel that sorts a batch's positions by chunk."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from xtoken_core.ops.chunks import ChunkPositions, chunk_positions
from xtoken_core.ops.position_kernels import chunk_positions_kernel

MOST = 16_384
"""Positions and chunk rows up to which all are compared with all; more are sorted."""
ENTRIES, BLOCK = 16, 512
"""Entries of a program, and positions that they are compared with at once."""


def positions_by_chunk(chunk_id: Tensor, max_chunks: int) -> ChunkPositions:
    """Compute the same as `chunk_positions`, a small batch's by one launch; call it in `launching_on`."""
    B, T = chunk_id.shape
    positions, rows = B * T, B * max_chunks
    # Comparing all with all is one launch instead of a sort's many, while it is small enough.
    if positions + rows > MOST:
        return chunk_positions(chunk_id, max_chunks)
    chunk, order = (torch.empty(positions, dtype=torch.int64, device=chunk_id.device) for _ in range(2))
    first = torch.empty(rows + 1, dtype=torch.int64, device=chunk_id.device)
    chunk_positions_kernel[(triton.cdiv(positions + rows + 1, ENTRIES),)](
        chunk_id.contiguous(), chunk, order, first, max(T, 1), max_chunks, positions, rows, ENTRIES, BLOCK
    )
    return ChunkPositions(chunk, order, first)
