"""The Triton backend of `cross_entropy`: each row is read once forward and once backward, in its own dtype."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtoken_core.ops.cross_entropy.kernels import cross_entropy_bwd_kernel
from xtoken_core.ops.cross_entropy.reference import cross_entropy
from xtoken_core.ops.numerics import Op
from xtoken_core.ops.row_kernels import row_statistics_kernel
from xtoken_core.ops.tensor_maps import WIDTH, row_matrix
from xtoken_core.ops.triton_support import accumulates_in_float32, launching_on, power_of_2, row_strides

BLOCK = 4096
STAGES = 3
"""Tiles of a row on their way at once, where it is read by TMA."""


class TritonCrossEntropy(torch.autograd.Function):
    """Per-position cross-entropy and hits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"], overwrite: bool
    ) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """Compute the same as the reference's `cross_entropy`."""
        # Only contiguous logits have the layout of the gradient.
        ctx.in_place = overwrite and logits.is_contiguous()
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        targets = targets.long().contiguous()
        B, T, V = logits.shape
        lse, own = (torch.empty((B, T), dtype=torch.float32, device=logits.device) for _ in range(2))
        best = torch.empty((B, T), dtype=torch.int64, device=logits.device)
        if B * T:
            block = min(BLOCK, power_of_2(V))
            matrix = row_matrix(logits, block)
            constants = 0 if matrix is None else STAGES, WIDTH, block
            row_statistics_kernel[(B * T,)](
                logits, matrix, targets, lse, own, best, T, V, *row_strides(logits), *constants
            )
        hits = best == targets  # the lowest id of a tie
        ctx.save_for_backward(logits, targets, lse)
        ctx.mark_non_differentiable(hits)
        return lse - own, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Float[Tensor, "B T"], grad_hits: Tensor | None) -> tuple[Tensor, None, None]:
        """Return the gradient in the dtype of the logits."""
        logits, targets, lse = ctx.saved_tensors
        B, T, V = logits.shape
        gradient = logits if ctx.in_place else torch.empty((B, T, V), dtype=logits.dtype, device=logits.device)
        if gradient.numel():
            block = min(BLOCK, power_of_2(V))
            inputs = logits, targets, lse, grad_losses.contiguous()
            cross_entropy_bwd_kernel[(B * T, triton.cdiv(V, block))](
                *inputs, gradient, T, V, *row_strides(logits), block
            )
        return gradient, None, None


class TritonCrossEntropyOp(Op):
    """Triton backend: float32 inside, no copy of the logits, deterministic."""

    def forward(
        self, logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"], *, overwrite: bool = False
    ) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """Compute the same as the reference, which runs for float64.

        With `overwrite` the gradient is written over the logits, if they are contiguous.
        """
        if not accumulates_in_float32(logits):
            return cross_entropy(logits, targets)
        with launching_on(logits):
            result: tuple[Tensor, Tensor] = TritonCrossEntropy.apply(logits, targets, overwrite)  # type: ignore[no-untyped-call]  # torch leaves it bare
        return result
