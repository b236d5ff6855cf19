"""The Triton backend of `token_kl`: both sides' rows are read once forward and once backward."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from xtoken_core.ops.numerics import Op
from xtoken_core.ops.token_kl.kernels import token_kl_bwd_kernel, token_kl_kernel
from xtoken_core.ops.token_kl.reference import TokenKLOptions, TokenKLResult, token_kl
from xtoken_core.ops.triton_support import accumulates_in_float32, launching_on, power_of_2, row_strides

BLOCK, GRADIENT_BLOCK = 2048, 4096
WARPS = 8


class TritonTokenKL(torch.autograd.Function):
    """Per-position KL and cross-entropy, with a gradient for the student's logits alone."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, targets: Tensor, options: TokenKLOptions
    ) -> tuple[Tensor, ...]:
        """Return (kl, agrees, losses, hits), each `[B, T]`."""
        logits, teacher = (each if each.stride(-1) == 1 else each.contiguous() for each in (student, teacher))
        B, T, V_head = logits.shape
        kl, losses, *lse = (torch.empty((B, T), dtype=torch.float32, device=logits.device) for _ in range(5))
        agrees, hits = (torch.empty((B, T), dtype=torch.bool, device=logits.device) for _ in range(2))
        scale = 1.0 / options.temperature
        results = kl, agrees, losses, hits, *lse
        sizes = T, options.vocab_size, V_head, *row_strides(logits), *row_strides(teacher)
        constants = scale, options.reverse, scale == 1.0, min(BLOCK, power_of_2(V_head))
        token_kl_kernel[(B * T,)](logits, teacher, targets, *results, *sizes, *constants, num_warps=WARPS)
        ctx.options = options
        ctx.save_for_backward(logits, teacher, targets, kl, *lse)
        ctx.mark_non_differentiable(agrees, hits)
        return kl, agrees, losses, hits

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_kl: Tensor, _: Tensor | None, of_losses: Tensor, __: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        """Return the gradient in the dtype of the logits, in their memory if that is allowed."""
        logits, teacher, targets, kl, *lse = ctx.saved_tensors
        options: TokenKLOptions = ctx.options
        B, T, V_head = logits.shape
        # A program reads and writes the same tile of the student's row.
        in_place = options.overwrite and logits.is_contiguous()
        gradient = logits if in_place else torch.empty((B, T, V_head), dtype=logits.dtype, device=logits.device)
        block = min(GRADIENT_BLOCK, power_of_2(V_head))
        upstream = of_kl.float().contiguous(), of_losses.float().contiguous()
        sizes = T, options.vocab_size, V_head, *row_strides(logits), *row_strides(teacher)
        constants = 1.0 / options.temperature, options.reverse, block
        token_kl_bwd_kernel[(B * T, triton.cdiv(V_head, block))](
            logits, teacher, targets, kl, *lse, *upstream, gradient, *sizes, *constants, num_warps=WARPS
        )
        if in_place:
            increment_version(logits)  # a second backward must not take the gradient for logits
        return gradient, None, None, None


class TritonTokenKLOp(Op):
    """Triton backend: float32 inside, no copy of the logits, deterministic."""

    def forward(
        self,
        student_logits: Float[Tensor, "B T V_head"],
        teacher_logits: Float[Tensor, "B T V_m"],
        targets: Int[Tensor, "B T"],
        options: TokenKLOptions,
    ) -> TokenKLResult:
        """Compute the same as the reference, which runs for float64 and without positions."""
        exact = not (accumulates_in_float32(student_logits) and accumulates_in_float32(teacher_logits))
        if exact or not student_logits.numel():
            return token_kl(student_logits, teacher_logits, targets, options)
        targets = targets.long().contiguous()
        with launching_on(student_logits):
            return TokenKLResult(*TritonTokenKL.apply(student_logits, teacher_logits.detach(), targets, options))  # type: ignore[no-untyped-call]  # torch leaves it bare
