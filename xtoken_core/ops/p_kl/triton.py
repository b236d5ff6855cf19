"""The Triton backends of `p_kl`: student rows are read twice and written once, with or without cross-entropy."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from xtoken_core.ops.numerics import Op
from xtoken_core.ops.p_kl.launch import Comparison
from xtoken_core.ops.p_kl.reference import PKLCrossEntropyResult, PKLOptions, PKLResult, p_kl, p_kl_cross_entropy
from xtoken_core.ops.position_launch import positions_by_chunk
from xtoken_core.ops.side_stream import join, second_stream
from xtoken_core.ops.sparse_projection.matrix import ProjectionMatrix
from xtoken_core.ops.triton_support import accumulates_in_float32, launching_on


class TritonPKL(torch.autograd.Function):
    """Per-chunk P-KL, and with targets per-position cross-entropy; one gradient, for the student's logits alone."""

    @staticmethod
    def forward(
        ctx: Any, student_logits: Tensor, teacher_logits: Tensor, inputs: Comparison, targets: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return (kl, agrees, mass), each `[B, P]`, with targets (losses, hits), `[B, T_s]`, and unnamed, `[B, P]`."""
        logits = student_logits if student_logits.stride(-1) == 1 else student_logits.contiguous()
        with second_stream(inputs.device):
            given = teacher_logits if teacher_logits.stride(-1) == 1 else teacher_logits.contiguous()
            teacher = inputs.teacher_rows(given)
        slots = inputs.slots()
        student = inputs.student_rows(logits, slots.counts, targets)
        join(inputs.device)
        chunks = inputs.chunks(student, teacher)
        ctx.inputs, ctx.with_targets = inputs, targets is not None
        by_position = student.lse, student.head_lse, student.sums, chunks.products, student.projected
        ctx.save_for_backward(logits, *slots, *by_position, chunks.norm, chunks.inner, targets)
        # `unnamed` comes last, as the results' order has it with and without targets.
        if student.losses is None or student.hits is None:
            ctx.mark_non_differentiable(chunks.agrees, chunks.mass, chunks.unnamed)
            return chunks.kl, chunks.agrees, chunks.mass, chunks.unnamed
        ctx.mark_non_differentiable(chunks.agrees, chunks.mass, student.hits, chunks.unnamed)
        return chunks.kl, chunks.agrees, chunks.mass, student.losses, student.hits, chunks.unnamed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor, *others: Tensor | None) -> tuple[Tensor, None, None, None]:
        """Return the gradient in the dtype of the logits, in their memory if that is allowed."""
        logits, *saved, norm, inner, targets = ctx.saved_tensors
        inputs: Comparison = ctx.inputs
        of_losses = others[2].float().contiguous() if ctx.with_targets and others[2] is not None else None
        gradient = inputs.student_gradient(
            logits,
            saved[:3],
            saved[3:],
            (grad_kl.float().contiguous(), norm, inner),
            targets if of_losses is not None else None,
            of_losses,
        )
        if gradient is logits:
            increment_version(logits)  # a second backward must not take the gradient for logits
        return gradient, None, None, None


def _compare(
    student_logits: Tensor,
    teacher_logits: Tensor,
    projection: ProjectionMatrix,
    columns: Tensor,
    student_chunk_id: Tensor,
    teacher_chunk_id: Tensor,
    options: PKLOptions,
    targets: Tensor | None,
) -> tuple[Tensor, ...]:
    with launching_on(student_logits):
        student = positions_by_chunk(student_chunk_id, options.max_chunks)
        teacher = positions_by_chunk(teacher_chunk_id, options.max_chunks)
        inputs = Comparison(projection, columns.contiguous(), student, teacher, options)
        result: tuple[Tensor, ...] = TritonPKL.apply(student_logits, teacher_logits.detach(), inputs, targets)  # type: ignore[no-untyped-call]  # torch leaves it bare
    return result


def _beyond_the_kernels(student_logits: Tensor, columns: Tensor, options: PKLOptions) -> bool:
    """Return True if there is nothing to launch or the arithmetic is float64."""
    empty = not student_logits.numel() * options.max_chunks * columns.shape[0]
    return empty or not accumulates_in_float32(student_logits)


class TritonPKLOp(Op):
    """Triton backend: float32 inside, deterministic, no float32 copy of either vocabulary."""

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
        """Compute the same as the reference, which runs for float64 and batches without a chunk."""
        alignment = student_chunk_id, teacher_chunk_id, options
        if _beyond_the_kernels(student_logits, columns, options):
            return p_kl(student_logits, teacher_logits, projection, columns, *alignment)
        return PKLResult(*_compare(student_logits, teacher_logits, projection, columns, *alignment, None))


class TritonPKLCrossEntropyOp(Op):
    """Triton backend: both losses from one reading of the student's rows, their gradient in one writing."""

    overwrites = True
    """True if the backend uses `options.overwrite`."""

    def forward(
        self,
        student_logits: Float[Tensor, "B T_s V_head"],
        teacher_logits: Float[Tensor, "B T_t V_m"],
        projection: ProjectionMatrix,
        columns: Int[Tensor, " K"],
        student_chunk_id: Int[Tensor, "B T_s"],
        teacher_chunk_id: Int[Tensor, "B T_t"],
        targets: Int[Tensor, "B T_s"],
        options: PKLOptions,
    ) -> PKLCrossEntropyResult:
        """Compute the same as the reference, which runs for float64 and batches without a chunk."""
        alignment = student_chunk_id, teacher_chunk_id
        if _beyond_the_kernels(student_logits, columns, options):
            return p_kl_cross_entropy(student_logits, teacher_logits, projection, columns, *alignment, targets, options)
        targets = targets.long().contiguous()
        return PKLCrossEntropyResult(
            *_compare(student_logits, teacher_logits, projection, columns, *alignment, options, targets)
        )
