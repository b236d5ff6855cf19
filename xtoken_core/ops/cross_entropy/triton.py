"""The Triton backend of `cross_entropy`: each row is read in its own dtype, once where backward's factors are known."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from xtoken_core.ops.cross_entropy.kernels import cross_entropy_bwd_kernel, cross_entropy_kernel
from xtoken_core.ops.cross_entropy.reference import cross_entropy
from xtoken_core.ops.numerics import Op
from xtoken_core.ops.triton_support import accumulates_in_float32, launching_on, power_of_2, row_parts, row_strides

BLOCK, WARPS = 4096, 4
"""Columns of a program, which holds them in registers."""


class TritonCrossEntropy(torch.autograd.Function):
    """Per-position cross-entropy and hits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Float[Tensor, "B T V"],
        targets: Int[Tensor, "B T"],
        overwrite: bool,
        upstream: Float[Tensor, "B T"] | None,
    ) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """Compute the same as the reference's `cross_entropy`."""
        # Only contiguous logits have the layout of the gradient.
        ctx.in_place = overwrite and logits.is_contiguous()
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        targets = targets.long().contiguous()
        B, T, V = logits.shape
        lse, losses = (torch.empty((B, T), dtype=torch.float32, device=logits.device) for _ in range(2))
        hits = torch.empty((B, T), dtype=torch.bool, device=logits.device)
        ctx.known = upstream is not None
        gradient = lse
        if upstream is not None:
            gradient = logits if ctx.in_place else torch.empty((B, T, V), dtype=logits.dtype, device=logits.device)
            upstream = upstream.float().contiguous()
        if B * T:
            parts = row_parts(logits, BLOCK)
            slots = targets.new_zeros(B * T * parts[0])
            given = logits, targets, targets if upstream is None else upstream, slots
            cross_entropy_kernel[(B * T * parts[0],)](
                *given, lse, losses, hits, gradient, T, V, *row_strides(logits), ctx.known, *parts, num_warps=WARPS
            )
        if ctx.known and ctx.in_place:
            increment_version(logits)  # a graph that has saved them must not take the gradient for logits
        ctx.save_for_backward(*((gradient,) if ctx.known else (logits, targets, lse)))
        ctx.mark_non_differentiable(hits)
        return losses, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Float[Tensor, "B T"], grad_hits: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient in the dtype of the logits."""
        if ctx.known:
            return *ctx.saved_tensors, None, None, None
        logits, targets, lse = ctx.saved_tensors
        B, T, V = logits.shape
        gradient = logits if ctx.in_place else torch.empty((B, T, V), dtype=logits.dtype, device=logits.device)
        if gradient.numel():
            block = min(BLOCK, power_of_2(V))
            inputs = logits, targets, lse, grad_losses.contiguous()
            cross_entropy_bwd_kernel[(B * T, triton.cdiv(V, block))](
                *inputs, gradient, T, V, *row_strides(logits), block
            )
        return gradient, None, None, None


class TritonCrossEntropyOp(Op):
    """Triton backend: float32 inside, no copy of the logits, deterministic."""

    def forward(
        self,
        logits: Float[Tensor, "B T V"],
        targets: Int[Tensor, "B T"],
        *,
        overwrite: bool = False,
        upstream: Float[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """Compute the same as the reference, which runs for float64.

        With `overwrite` the gradient is written over the logits, if they are contiguous. With `upstream`, the gradient
        that the losses are going to get, it is computed at once; backward returns it whatever it is called with.
        """
        if not accumulates_in_float32(logits):
            return cross_entropy(logits, targets)
        with launching_on(logits):
            result: tuple[Tensor, Tensor] = TritonCrossEntropy.apply(logits, targets, overwrite, upstream)  # type: ignore[no-untyped-call]  # torch leaves it bare
        return result
