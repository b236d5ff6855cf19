"""The Triton backend of `chunk_mean`: every position of a chunk is read once, the others never."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtoken_core.ops.chunk_mean.kernels import chunk_mean_bwd_kernel, chunk_mean_kernel
from xtoken_core.ops.chunk_mean.reference import NativeChunkMeanOp
from xtoken_core.ops.chunks import chunk_positions
from xtoken_core.ops.numerics import EPSILON, Op
from xtoken_core.ops.triton_support import accumulates_in_float32, launching_on, power_of_2, row_strides

BLOCK = 1024
"""Columns that a program takes."""


class TritonChunkMean(torch.autograd.Function):
    """Per-chunk means, and the sizes of the chunks."""

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "B T V"], chunk_id: Int[Tensor, "B T"], max_chunks: int
    ) -> tuple[Float[Tensor, "B P V"], Float[Tensor, "B P"]]:
        """Compute the same as the reference's `forward`."""
        B, T, V = x.shape
        x = x if x.stride(-1) == 1 else x.contiguous()
        positions = chunk_positions(chunk_id, max_chunks)  # sorted by chunk
        means = torch.empty((B, max_chunks, V), dtype=x.dtype, device=x.device)
        sizes = torch.empty((B, max_chunks), dtype=torch.float32, device=x.device)
        block = min(BLOCK, power_of_2(V))
        chunk_mean_kernel[(B * max_chunks, triton.cdiv(V, block))](
            x, positions.order, positions.first, means, sizes, T, V, *row_strides(x), EPSILON, block
        )
        ctx.shape, ctx.block = x.shape, block
        # The gradient needs no input: a position gets its chunk's, over the chunk's size.
        ctx.save_for_backward(positions.chunk, positions.first)
        ctx.mark_non_differentiable(sizes)
        return means, sizes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_means: Float[Tensor, "B P V"], _: Tensor | None) -> tuple[Tensor, None, None]:
        """Return the gradient of every position, in the dtype of `x`."""
        chunk, first = ctx.saved_tensors
        B, T, V = ctx.shape
        gradient = torch.empty(ctx.shape, dtype=grad_means.dtype, device=grad_means.device)
        with launching_on(gradient):
            chunk_mean_bwd_kernel[(B * T, triton.cdiv(V, ctx.block))](
                grad_means.contiguous(), chunk, first, gradient, V, EPSILON, ctx.block
            )
        return gradient, None, None


class TritonChunkMeanOp(Op):
    """Triton backend: float32 inside, no copy of `x`, deterministic."""

    def forward(
        self, x: Float[Tensor, "B T V"], chunk_id: Int[Tensor, "B T"], max_chunks: int
    ) -> tuple[Float[Tensor, "B P V"], Float[Tensor, "B P"]]:
        """Compute the same as the reference, which runs for float64 and for empty inputs."""
        if not x.numel() * max_chunks or not accumulates_in_float32(x):
            means, sizes = NativeChunkMeanOp()(x, chunk_id, max_chunks)
            return means, sizes
        with launching_on(x):
            result: tuple[Tensor, Tensor] = TritonChunkMean.apply(x, chunk_id, max_chunks)  # type: ignore[no-untyped-call]  # torch leaves it bare
        return result
