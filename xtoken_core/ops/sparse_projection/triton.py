"""The Triton backend of `sparse_projection`: a gather in both directions, so that no sum depends on the batch."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtoken_core.ops.numerics import Op
from xtoken_core.ops.sparse_projection.kernels import sparse_projection_bwd_kernel, sparse_projection_kernel
from xtoken_core.ops.sparse_projection.matrix import ProjectionMatrix
from xtoken_core.ops.sparse_projection.reference import NativeSparseProjectionOp
from xtoken_core.ops.triton_support import accumulates_in_float32, launching_on, rounded_up

BLOCK = 1024
"""Rows that a program takes."""


class TritonSparseProjection(torch.autograd.Function):
    """`x W` for rows `x`; no gradient for `W`."""

    @staticmethod
    def forward(ctx: Any, x: Float[Tensor, "N V_s"], projection: ProjectionMatrix) -> Float[Tensor, "N V_t"]:
        """Compute the same as the reference; the result is a view of `[V_t, N]`."""
        lines, W = _lines(x), projection  # [V_s, N]
        N = lines.shape[1]
        out = torch.empty((W.teacher_vocab_size, N), dtype=x.dtype, device=x.device)
        sparse_projection_kernel[(W.teacher_vocab_size, triton.cdiv(N, BLOCK))](
            lines, W.offsets, W.sources, W.weights, out, N, BLOCK
        )
        ctx.projection = projection
        return out[:, : x.shape[0]].t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Float[Tensor, "N V_t"]) -> tuple[Float[Tensor, "N V_s"], None]:
        """Compute `grad_out W^T`, in the dtype of `x`."""
        lines, W = _lines(grad_out), ctx.projection  # [V_t, N]
        N = lines.shape[1]
        slots, V_s = W.slot_targets.shape
        gradient = torch.empty((V_s, N), dtype=grad_out.dtype, device=grad_out.device)
        with launching_on(gradient):
            sparse_projection_bwd_kernel[(V_s, triton.cdiv(N, BLOCK))](
                lines, W.slot_targets, W.slot_weights, gradient, N, V_s, slots, BLOCK
            )
        return gradient[:, : grad_out.shape[0]].t(), None


def _lines(rows: Tensor) -> Tensor:
    """Return the columns of rows as lines of a multiple of 16, as they lie or as a copy.

    Alignment by 16 is part of what kernels are compiled by; a copy's further rows are 0.
    """
    N, V = rows.shape
    lines = rows.t()
    if N % 16 == 0 and lines.is_contiguous() and lines.data_ptr() % 16 == 0:
        return lines
    copy = rows.new_empty((V, rounded_up(N)))
    copy[:, :N] = lines
    copy[:, N:] = 0
    return copy


class TritonSparseProjectionOp(Op):
    """Triton backend: float32 inside whatever autocast surrounds it, deterministic."""

    def forward(self, x: Float[Tensor, "*rows V_s"], projection: ProjectionMatrix) -> Float[Tensor, "*rows V_t"]:
        """Compute the same as the reference, which runs for float64 and for empty inputs."""
        if not x.numel() or not projection.teacher_vocab_size or not accumulates_in_float32(x):
            product: Tensor = NativeSparseProjectionOp()(x, projection)
            return product
        with launching_on(x):
            out: Tensor = TritonSparseProjection.apply(x.reshape(-1, x.shape[-1]), projection)  # type: ignore[no-untyped-call]  # torch leaves it bare
        return out.reshape(*x.shape[:-1], projection.teacher_vocab_size)
