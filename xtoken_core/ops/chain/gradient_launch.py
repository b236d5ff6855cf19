"""The launches of the chain gradient: a pass over all logits, and the nodes' parts at single tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from xtoken_core.ops.chain import gradient_kernels, launch, node_gradient_kernels, start_kernels
from xtoken_core.ops.chain.launch import Comparison, NodeResults, Rows, StartResults
from xtoken_core.ops.side_stream import event_of_second, join, second_stream, wait_for
from xtoken_core.ops.triton_support import processors

GRADIENT_LANES, GRADIENT_WARPS = 256, 8
"""Lanes over a row, of `start_kernels.ADJACENT` logits each."""
GRADIENT_TILES = 8
"""Tiles of a program that stores a gradient: what is the same for a row is read once for them."""
GRADIENT_PARTS = 4
"""Parts of the rows: beside the pass over one of them, the gradients of the nodes of another are computed."""
NODE_GRADIENT_PROGRAMS_PER_PROCESSOR = 16


class Kept(NamedTuple):
    """Values that the gradient reads.

    Attributes:
        starts: Values of rows and starts.
        mass: `[B * P]`, each start's mass that is not below the floor.
        slope: `[2, B * P]`, what ratios in generated text depend on; None: all text is given.
        inside: Values of the nodes inside the student's tokens.
        beside: Values of the nodes inside the teacher's tokens.
    """

    starts: StartResults
    mass: Tensor
    slope: Tensor | None
    inside: NodeResults
    beside: NodeResults


class Gradient:
    """The launches over one call's rows.

    Over the logits, the nodes' kernel is the first: it stores the whole gradient of the tokens that a node holds or
    names, and marks them for the pass over all logits, which leaves them as they are. Otherwise it is the second.
    """

    def __init__(
        self,
        inputs: Comparison,
        student: Rows,
        teacher: Rows,
        targets: Tensor | None,
        kept: Kept,
        upstream: tuple[Tensor | None, Tensor],
        *,
        overwrite: bool,
    ) -> None:
        """Collect the kernels' arguments.

        Args:
            inputs: The events.
            student: Logits.
            teacher: Logits.
            targets: `[B, T_s]`, or None.
            kept: What the gradient reads of the values.
            upstream: Gradient of the losses `[B, T_s]`, or None, and of the parts, `[3, B * P]`.
            overwrite: True to write over the student's logits, if they are contiguous.
        """
        B, T_s, V_head = student.logits.shape
        self.inputs, self.kept, self.rows, self.width = inputs, kept, B * T_s, V_head
        self.has_nodes = bool(len(kept.inside.value) or len(kept.beside.value))
        in_place = overwrite and student.logits.is_contiguous()
        self.gradient = student.logits.detach() if in_place else student.logits.new_empty(student.logits.shape)
        self.nodes_first = in_place and self.has_nodes
        words = triton.cdiv(V_head, 32)
        # Another tensor takes its place where nothing is marked.
        stored = inputs.event_of_row
        if self.nodes_first:
            stored = torch.zeros((self.rows, words), dtype=torch.int32, device=inputs.device)
        self.row = *self._row(student, teacher, targets, *upstream), self.gradient, V_head, stored, words
        self.settings: dict[str, Any] = {
            "TARGETS": upstream[0] is not None,
            "UNSCALED": inputs.scale == 1.0,
            "IN_PLACE": self.nodes_first,
            "FORM": inputs.form,
        }

    def compute(self) -> Tensor:
        """Return the gradient, `[B, T_s, V_head]`."""
        step = triton.cdiv(self.rows, GRADIENT_PARTS)
        parts = [(first, min(first + step, self.rows)) for first in range(0, self.rows, step)]
        device = self.inputs.device
        # In place a stored gradient replaces its logit: nodes store their tokens first, and the pass skips these.
        if self.nodes_first:
            stored = []
            with second_stream(device):
                for part in parts:
                    self.add_nodes(*part)
                    stored.append(event_of_second(device))
            for part, event in zip(parts, stored, strict=True):
                wait_for(device, event)
                self.pass_over(*part)
            return self.gradient
        # Otherwise the pass comes first, and the nodes' tokens are stored again, with all their parts.
        for part in parts:
            self.pass_over(*part)
            if self.has_nodes:
                with second_stream(device):
                    self.add_nodes(*part)
        if self.has_nodes:
            join(device)
        return self.gradient

    def pass_over(self, first: int, last: int) -> None:
        """Launch the row kernel: the element-wise part of the gradient, for rows `first` to `last - 1`."""
        blocks = triton.cdiv(self.width, GRADIENT_TILES * GRADIENT_LANES * start_kernels.ADJACENT.value)
        gradient_kernels.chain_row_bwd_kernel[((last - first) * blocks,)](
            *self.row,
            first,
            blocks,
            **self.settings,
            TILES=GRADIENT_TILES,
            LANES=GRADIENT_LANES,
            num_warps=GRADIENT_WARPS,
            **self.inputs.registers(launch.GRADIENT_REGISTERS),
        )

    def add_nodes(self, first: int, last: int) -> None:
        """Launch the node kernel: the whole gradient of the tokens that a node holds or names, for these rows."""
        inputs, inside, beside = self.inputs, self.kept.inside, self.kept.beside
        own, other = inputs.plan.student.nodes, inputs.plan.teacher.nodes
        # Room for the longest list on each side, in float32; a program uses it for row after row.
        capacity = own.held.most_tokens, other.fresh.most_tokens
        most = processors(inputs.device) * NODE_GRADIENT_PROGRAMS_PER_PROCESSOR
        programs = max(1, min(most, last - first))
        sums = torch.empty((programs, sum(capacity)), dtype=torch.float32, device=inputs.device)
        bounds = inputs.bounds[1]
        events = inputs.in_student, inputs.in_teacher
        starts = events[0].chunk, bounds.first, bounds.size, len(inside.value), events[0].node
        held = own.slot_start, own.held.node_start, own.held.token
        of_held = inside.held_lse, inside.mass, inside.ratio, own.most_slots, events[0].at_end
        named = events[1].node, other.slot_start, other.fresh.node_start, other.fresh.token, other.fresh.slot
        of_named = beside.mass, beside.ratio, other.most_slots
        scratch = sums, sum(capacity), capacity[0]
        lists = *starts, *held, *of_held, *own.spelled, *named, *of_named, *scratch
        node_gradient_kernels.chain_node_bwd_kernel[(programs,)](
            *self.row, first, last, *lists, **self.settings, SLOTS=launch.SLOTS, num_warps=launch.NODE_WARPS
        )

    def _row(
        self, student: Rows, teacher: Rows, targets: Tensor | None, of_losses: Tensor | None, of_parts: Tensor
    ) -> tuple[Any, ...]:
        inputs, plan, (starts, mass, slope, _, beside) = self.inputs, self.inputs.plan, self.kept
        rows = inputs.event_of_row, inputs.starts.teacher_row, starts.student_bits, starts.teacher_bits
        sums = starts.head_lse, starts.top, starts.total, mass, starts.student_lse, starts.teacher_lse, slope
        nodes = inputs.in_teacher.chunk, inputs.in_teacher.at_end, of_parts.shape[1], beside.level, len(beside.level)
        sizes = student.positions, teacher.positions, student.width, plan.others, starts.student_bits.shape[1]
        logits = student.logits, teacher.logits, targets
        values = *rows, plan.partner, starts.ratio, *sums, of_losses, of_parts, *nodes
        return *logits, *values, *sizes, *student.strides, *teacher.strides, inputs.scale
