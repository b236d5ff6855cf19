"""The Triton backend of `chain_topk`: the student's rows are read once, the teacher's lists where they are."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtoken_core.chain.tables import ChainTables
from xtoken_core.ops.chain.events import SideTokens
from xtoken_core.ops.chain.layout import chain_layout
from xtoken_core.ops.chain_topk.launch import Kept, ListedComparison, ListedNodes, Lists, RowResults, student_classes
from xtoken_core.ops.chain_topk.reference import ChainTopKResult, ChainTopKSettings, chain_topk
from xtoken_core.ops.numerics import Op
from xtoken_core.ops.triton_support import accumulates_in_float32, launching_on


class TritonChainTopK(torch.autograd.Function):
    """Per-chunk parts of the divergence and listed mass, per-position cross-entropy; one gradient of all."""

    @staticmethod
    def forward(ctx: Any, student_logits: Tensor, inputs: ListedComparison, given: Lists) -> tuple[Tensor, ...]:
        """Return the parts `[3, B, P]`, the listed mass `[B, P]`, and if asked for losses and hits `[B, T_s]`."""
        logits = student_logits if student_logits.stride(-1) == 1 else student_logits.contiguous()
        forward_results, kept = inputs.forward(logits, given)
        ctx.inputs = inputs
        ctx.save_for_backward(logits, *kept.rows, *kept.inside, *kept.beside, kept.classes)
        parts = forward_results.parts.view(3, *inputs.shape)
        listed = forward_results.listed.view(inputs.shape)
        if forward_results.losses is None or forward_results.hits is None:
            ctx.mark_non_differentiable(listed)
            return parts, listed
        ctx.mark_non_differentiable(listed, forward_results.hits)
        return parts, listed, forward_results.losses, forward_results.hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_parts: Tensor, _: Tensor, *others: Tensor | None) -> tuple[Tensor, None, None]:
        """Return the gradient in the dtype of the logits."""
        logits, *saved = ctx.saved_tensors
        inputs: ListedComparison = ctx.inputs
        n, m = len(RowResults._fields), len(ListedNodes._fields)
        inside, beside = ListedNodes(*saved[n : n + m]), ListedNodes(*saved[n + m : n + 2 * m])
        kept = Kept(RowResults(*saved[:n]), inside, beside, saved[-1])
        of_losses = others[0].float().contiguous() if others and others[0] is not None else None
        of_parts = of_parts.float().reshape(3, -1).contiguous()
        return inputs.backward(logits, kept, of_losses, of_parts), None, None


class TritonChainTopKOp(Op):
    """Triton backend: float32 inside, deterministic, nothing of the size of all classes or of the teacher's tokens."""

    reads_once = True
    """True if divergence and cross-entropy share one reading of the student's rows and one gradient."""

    def prepare(self, tables: ChainTables) -> None:
        """Derive from the tables what a call needs, so that no call waits for the device."""
        tables.read_sizes()
        chain_layout(tables)
        student_classes(tables)

    def forward(
        self,
        student_logits: Float[Tensor, "B T_s V_head"],
        log_probs: Float[Tensor, "B T_t k"],
        ids: Int[Tensor, "B T_t k"],
        tail: Float[Tensor, "B T_t"],
        student: SideTokens,
        teacher: SideTokens,
        tables: ChainTables,
        settings: ChainTopKSettings,
    ) -> ChainTopKResult:
        """Compute the same as the reference, which runs for float64 and batches without a chunk."""
        empty = not student_logits.numel() * ids.numel() * settings.max_chunks
        exact = not (accumulates_in_float32(student_logits) and accumulates_in_float32(log_probs))
        if empty or exact:
            return chain_topk(student_logits, log_probs, ids, tail, student, teacher, tables, settings)
        with launching_on(student_logits):
            inputs = ListedComparison(tables, (student, teacher), settings)
            given = Lists.of(log_probs.detach(), ids, tail.detach(), tables)
            outputs = TritonChainTopK.apply(student_logits, inputs, given)  # type: ignore[no-untyped-call]  # torch leaves it bare
        return ChainTopKResult(*outputs[0].unbind(), *outputs[1:])
