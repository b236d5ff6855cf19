"""The Triton backend of `p_kl`: student rows are read twice and written once, nothing else is a vocabulary wide."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from xtoken_core.ops.chunks import ChunkPositions, chunk_positions
from xtoken_core.ops.numerics import upcast
from xtoken_core.ops.p_kl.kernels import (
    p_kl_chunk_kernel,
    p_kl_position_bwd_kernel,
    p_kl_project_kernel,
    p_kl_teacher_lse_kernel,
)
from xtoken_core.ops.p_kl.reference import PKLOptions, PKLResult, p_kl
from xtoken_core.ops.sparse_projection.matrix import ProjectionMatrix
from xtoken_core.ops.triton_support import accumulates_in_float32, launching_on, power_of_2

BLOCK = 2048
BLOCK_K = 1024


class _Launch:
    """The launches of one call, on rows of logits whose last dimension is contiguous."""

    def __init__(
        self,
        student_logits: Tensor,
        teacher_logits: Tensor,
        projection: ProjectionMatrix,
        columns: Tensor,
        student: ChunkPositions,
        teacher: ChunkPositions,
        options: PKLOptions,
    ) -> None:
        self.z_s, self.z_t, self.projection, self.columns = student_logits, teacher_logits, projection, columns
        self.student, self.teacher, self.options = student, teacher, options
        self.scale = 1.0 / options.temperature
        self.K = columns.shape[0]
        self.block_k = min(BLOCK_K, power_of_2(self.K))
        self.block = min(BLOCK, power_of_2(student_logits.shape[-1]))

    def project(self) -> tuple[Tensor, Tensor]:
        """`[B * T_s, K]` projected probabilities and `[B * T_s]` log-sum-exps; rows of no chunk are not written."""
        B, T, V = self.z_s.shape
        lse = torch.empty(B * T, dtype=torch.float32, device=self.z_s.device)
        projected = torch.empty((B * T, self.K), dtype=torch.float32, device=self.z_s.device)
        W = self.projection
        p_kl_project_kernel[(B * T,)](
            self.z_s, self.student.chunk, self.columns, W.offsets, W.sources, W.weights, lse, projected,
            T, V, self.K, self.z_s.stride(0), self.z_s.stride(1), self.scale, self.block, self.block_k,
        )  # fmt: skip
        return projected, lse

    def teacher_lse(self) -> Tensor:
        """`[B * T_t]` log-sum-exps over the compared columns."""
        B, T, _ = self.z_t.shape
        lse = torch.empty(B * T, dtype=torch.float32, device=self.z_t.device)
        p_kl_teacher_lse_kernel[(B * T,)](
            self.z_t, self.teacher.chunk, self.columns, lse,
            T, self.K, self.z_t.stride(0), self.z_t.stride(1), self.scale, self.block_k,
        )  # fmt: skip
        return lse

    def chunks(
        self, projected: Tensor, teacher_lse: Tensor, upstream: Tensor, outputs: tuple[Tensor, ...], *, backward: bool
    ) -> None:
        """Fill (kl, agrees, mass, gradient); which of them depends on the direction."""
        rows = self.student.first.shape[0] - 1
        p_kl_chunk_kernel[(rows,)](
            projected, self.student.order, self.student.first,
            self.z_t, self.teacher.order, self.teacher.first, teacher_lse, self.columns, upstream, *outputs,
            self.z_t.shape[1], self.K, self.z_t.stride(0), self.z_t.stride(1), self.scale,
            self.options.reverse, self.options.teacher_average == "prob", backward, self.block_k,
        )  # fmt: skip

    def student_gradient(self, projected: Tensor, lse: Tensor, of_entries: Tensor, upstream: Tensor) -> Tensor:
        """`[B, T_s, V_s]` in the dtype of the logits."""
        B, T, V = self.z_s.shape
        W = self.projection
        place = torch.full((W.teacher_vocab_size,), -1, dtype=torch.int32, device=self.z_s.device)
        place = place.scatter(0, self.columns, torch.arange(self.K, dtype=torch.int32, device=self.z_s.device))
        out = torch.empty((B, T, V), dtype=self.z_s.dtype, device=self.z_s.device)
        p_kl_position_bwd_kernel[(B * T,)](
            self.z_s, self.student.chunk, upstream, lse, projected, of_entries, place,
            W.student_offsets, W.targets, W.student_weights, out,
            T, V, self.K, self.z_s.stride(0), self.z_s.stride(1), self.scale, self.block, self.block_k,
        )  # fmt: skip
        return out


class TritonPKL(torch.autograd.Function):
    """Per-chunk P-KL with a gradient for the student's logits alone."""

    @staticmethod
    def forward(ctx: Any, student_logits: Tensor, launch: _Launch, shape: tuple[int, int]) -> tuple[Tensor, ...]:
        """(kl, agrees, mass), each `[B, P]`."""
        device = student_logits.device
        kl, mass = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
        agrees = torch.empty(shape, dtype=torch.bool, device=device)
        projected, lse = launch.project()
        teacher_lse = launch.teacher_lse()
        launch.chunks(projected, teacher_lse, kl, (kl, agrees, mass, kl), backward=False)
        ctx.launch = launch
        ctx.save_for_backward(projected, lse, teacher_lse)
        ctx.mark_non_differentiable(agrees, mass)
        return kl, agrees, mass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor, *_: Tensor | None) -> tuple[Tensor, None, None]:
        """The gradient in the dtype of the logits."""
        projected, lse, teacher_lse = ctx.saved_tensors
        upstream = grad_kl.float().contiguous()
        of_entries = torch.empty((upstream.numel(), ctx.launch.K), dtype=torch.float32, device=upstream.device)
        unused = (upstream, upstream, upstream, of_entries)
        ctx.launch.chunks(projected, teacher_lse, upstream, unused, backward=True)
        return ctx.launch.student_gradient(projected, lse, of_entries, upstream), None, None


class TritonPKLOp(nn.Module):
    """Triton backend: float32 inside, deterministic, no vocabulary-wide copy of either side."""

    def forward(
        self,
        student_logits: Float[Tensor, "B T_s V_s"],
        teacher_logits: Float[Tensor, "B T_t V_m"],
        projection: ProjectionMatrix,
        columns: Int[Tensor, " K"],
        student_chunk_id: Int[Tensor, "B T_s"],
        teacher_chunk_id: Int[Tensor, "B T_t"],
        options: PKLOptions,
    ) -> PKLResult:
        """As the reference's `p_kl`; float64 and batches without a chunk take that path."""
        P = options.max_chunks
        if not accumulates_in_float32(student_logits) or not student_chunk_id.shape[0] * P * columns.shape[0]:
            return p_kl(
                student_logits, teacher_logits, projection, columns, student_chunk_id, teacher_chunk_id, options
            )
        student_logits, teacher_logits = (
            z if z.stride(-1) == 1 else z.contiguous() for z in (student_logits, teacher_logits.detach())
        )
        launch = _Launch(
            student_logits.detach(),
            teacher_logits,
            projection,
            columns.contiguous(),
            chunk_positions(student_chunk_id, P),
            chunk_positions(teacher_chunk_id, P),
            options,
        )
        shape = (student_logits.shape[0], P)
        with launching_on(student_logits):
            return PKLResult(*TritonPKL.apply(student_logits, launch, shape))  # type: ignore[no-untyped-call]  # torch leaves it bare

    def forward_fp32(
        self,
        student_logits: Float[Tensor, "B T_s V_s"],
        teacher_logits: Float[Tensor, "B T_t V_m"],
        projection: ProjectionMatrix,
        columns: Int[Tensor, " K"],
        student_chunk_id: Int[Tensor, "B T_s"],
        teacher_chunk_id: Int[Tensor, "B T_t"],
        options: PKLOptions,
    ) -> PKLResult:
        """As `forward` on logits upcast first."""
        return self.forward(
            upcast(student_logits),
            upcast(teacher_logits),
            projection,
            columns,
            student_chunk_id,
            teacher_chunk_id,
            options,
        )
