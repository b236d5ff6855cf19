"""Chunk ids in the form that kernels read: the positions of every chunk, side by side."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor


class ChunkPositions(NamedTuple):
    """The positions of a batch, sorted by chunk. Chunk `c` of sample `b` is row `b * P + c`.

    Attributes:
        chunk: `[B * T]` int64 chunk row of each position, -1 = none.
        order: `[B * T]` int64 positions, those of a chunk next to each other and ascending.
        first: `[B * P + 1]` int64; row `r` has `order[first[r] : first[r + 1]]`.
    """

    chunk: Int[Tensor, " BT"]
    order: Int[Tensor, " BT"]
    first: Int[Tensor, " BP_1"]


def chunk_positions(chunk_id: Int[Tensor, "B T"], max_chunks: int) -> ChunkPositions:
    """Sort a batch's positions by chunk, without waiting for the device.

    Args:
        chunk_id: Chunk of each position; anything outside `[0, max_chunks)` is none.
        max_chunks: `P`.
    """
    B, T = chunk_id.shape
    rows = torch.arange(B, device=chunk_id.device).unsqueeze(1) * max_chunks + chunk_id.long()
    outside = (chunk_id < 0) | (chunk_id >= max_chunks)
    keys = rows.masked_fill(outside, B * max_chunks).reshape(B * T)  # positions of no chunk sort behind all others
    ordered, order = keys.sort(stable=True)  # stable: a chunk's positions stay ascending, so sums have one order
    edges = torch.arange(B * max_chunks + 1, device=chunk_id.device)
    return ChunkPositions(rows.masked_fill(outside, -1).reshape(B * T), order, torch.searchsorted(ordered, edges))
