"""The Triton backend of `chain`: both sides' rows are read where they are, and one gradient is written."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtoken_core.chain.tables import ChainTables
from xtoken_core.ops.chain.events import SideTokens
from xtoken_core.ops.chain.gradient_launch import Gradient, Kept
from xtoken_core.ops.chain.launch import Comparison, NodeResults, Rows, StartResults
from xtoken_core.ops.chain.layout import chain_layout
from xtoken_core.ops.chain.reference import ChainResult, ChainSettings, chain
from xtoken_core.ops.numerics import Op
from xtoken_core.ops.triton_support import accumulates_in_float32, launching_on


class TritonChain(torch.autograd.Function):
    """Per-chunk parts of the divergence, and with targets per-position cross-entropy; one gradient of both."""

    @staticmethod
    def forward(
        ctx: Any,
        student_logits: Tensor,
        teacher_logits: Tensor,
        inputs: Comparison,
        targets: Tensor | None,
        overwrite: bool,
    ) -> tuple[Tensor, ...]:
        """Return the parts `[3, B, P]`, and with targets (losses, hits), each `[B, T_s]`."""
        logits = student_logits if student_logits.stride(-1) == 1 else student_logits.contiguous()
        given = teacher_logits if teacher_logits.stride(-1) == 1 else teacher_logits.contiguous()
        student, teacher = _rows(inputs, logits, given)
        B, P = inputs.shape
        starts, members, terms, losses, hits = inputs.start_values(student, teacher, targets)
        inside, beside = inputs.compare(student, teacher, starts, members, terms)
        flat, mass, slope = inputs.parts(terms, inside.value, beside.value)
        inputs.store_mixtures(student, teacher, starts, flat, mass, slope)
        parts = flat.view(3, B, P)
        ctx.inputs, ctx.with_targets, ctx.overwrite = inputs, targets is not None, overwrite
        ctx.save_for_backward(logits, given, targets, mass, slope, *starts, *inside, *beside)
        if losses is None or hits is None:
            return (parts,)
        ctx.mark_non_differentiable(hits)
        return parts, losses, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_parts: Tensor, *others: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        """Return the gradient in the dtype of the logits."""
        logits, given, targets, mass, slope, *saved = ctx.saved_tensors
        inputs: Comparison = ctx.inputs
        of_losses = others[0].float().contiguous() if ctx.with_targets and others[0] is not None else None
        # Tensors are saved flat, so that autograd watches each for changes.
        n, m = len(StartResults._fields), len(NodeResults._fields)
        inside, beside = NodeResults(*saved[n : n + m]), NodeResults(*saved[n + m :])
        kept = Kept(StartResults(*saved[:n]), mass, slope, inside, beside)
        upstream = of_losses, of_parts.float().reshape(3, -1).contiguous()
        rows = _rows(inputs, logits, given)
        gradient = Gradient(inputs, *rows, targets, kept, upstream, overwrite=ctx.overwrite).compute()
        return gradient, None, None, None, None


def _rows(inputs: Comparison, student: Tensor, teacher: Tensor) -> tuple[Rows, Rows]:
    return Rows(student, len(inputs.tables.student.root)), Rows(teacher, len(inputs.tables.teacher.root))


class TritonChainOp(Op):
    """Triton backend: float32 inside, deterministic, nothing of the size of all classes but for the rows in work."""

    reads_once = True
    """True if divergence and cross-entropy share one reading of the student's rows and one gradient."""

    def prepare(self, tables: ChainTables) -> None:
        """Derive from the tables what a call needs, so that no call waits for the device."""
        tables.read_sizes()
        chain_layout(tables)

    def forward(
        self,
        student_logits: Float[Tensor, "B T_s V_head"],
        teacher_logits: Float[Tensor, "B T_t V_m"],
        student: SideTokens,
        teacher: SideTokens,
        tables: ChainTables,
        settings: ChainSettings,
    ) -> ChainResult:
        """Compute the same as the reference, which runs for float64 and batches without a chunk or a position."""
        empty = not student_logits.numel() * teacher_logits.numel() * settings.max_chunks
        exact = not (accumulates_in_float32(student_logits) and accumulates_in_float32(teacher_logits))
        if empty or exact:
            return chain(student_logits, teacher_logits, student, teacher, tables, settings)
        with launching_on(student_logits):
            sides = student, teacher
            common = settings.max_chunks, settings.options, settings.temperature, settings.generated
            inputs = Comparison(tables, sides, *common)
            targets = student.predicted.long().contiguous() if settings.with_cross_entropy else None
            given = student_logits, teacher_logits.detach(), inputs, targets, settings.overwrite
            outputs = TritonChain.apply(*given)  # type: ignore[no-untyped-call]  # torch leaves it bare
        return ChainResult(*outputs[0].unbind(), *outputs[1:])
