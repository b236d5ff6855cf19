"""The launches behind the Triton backend of `chain`: events, buffers, grids and the sizes of blocks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from xtoken_core.chain.tables import ChainTables
from xtoken_core.ops.chain import layout, node_kernels, start_kernels
from xtoken_core.ops.chain.events import Inner, Layout, SideTokens, Starts, find_inner, find_starts, lay_out
from xtoken_core.ops.chain.layout import ChainLayout, Live, Nodes, Segments, SideLayout, chain_layout
from xtoken_core.ops.chain.reference import ChainOptions

BLOCK, WORDS, RULES, TOKENS, SLOTS, FEW = 2048, 1024, 16, 32, 512, 64
"""Logits, words of a live set, rules and tokens of a rule's interval, and slots of a node that are read at once;
and the most slots of a node that are summed one after the other."""
START_BLOCK, GRADIENT_BLOCK = 4096, 1024
START_WARPS, GRADIENT_WARPS, NODE_WARPS, LIVE_WARPS = 32, 8, 16, 4
PROGRAMS_PER_PROCESSOR, NODE_PROGRAMS_PER_PROCESSOR = 1, 2
INTERPRETED_PROGRAMS = 3


class StartResults(NamedTuple):
    """Values of the starts that their gradient needs, by event."""

    student_bits: Tensor
    teacher_bits: Tensor
    ratio: Tensor
    head_lse: Tensor
    mass: Tensor
    student_lse: Tensor
    teacher_lse: Tensor


class NodeResults(NamedTuple):
    """Values of nodes, and sums that their gradient needs, by event."""

    value: Tensor
    mass: Tensor
    held_lse: Tensor
    fresh_lse: Tensor
    rest: Tensor


@dataclass(frozen=True)
class Rows:
    """One side's logits as kernels read them."""

    logits: Tensor
    width: int

    @property
    def strides(self) -> tuple[int, int]:
        """Strides of sample and position."""
        return self.logits.stride(0), self.logits.stride(1)

    @property
    def positions(self) -> int:
        """`T`."""
        return self.logits.shape[1]


@cache
def processors(device: torch.device) -> int:
    """Return a GPU's number of multiprocessors, and few in the interpreter."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Comparison:
    """One call's events, and the launches over them; logits pass through and are not kept."""

    def __init__(
        self,
        tables: ChainTables,
        sides: tuple[SideTokens, SideTokens],
        max_chunks: int,
        options: ChainOptions,
        temperature: float,
    ) -> None:
        """Find the events, without waiting for the device."""
        self.tables, self.options, self.scale = tables, options, 1.0 / temperature
        self.plan: ChainLayout = chain_layout(tables)
        self.device = sides[0].chunk.device
        self.shape = sides[0].chunk.shape[0], max_chunks
        self.layouts: tuple[Layout, Layout] = (lay_out(sides[0], max_chunks), lay_out(sides[1], max_chunks))
        self.starts: Starts = find_starts(*self.layouts)
        flags = {"end_terms": options.end_terms, "bare_space": options.bare_space}
        self.in_student: Inner = find_inner(self.layouts[0], self.layouts[1], tables.student, **flags, learns=True)
        self.in_teacher: Inner = find_inner(self.layouts[1], self.layouts[0], tables.teacher, **flags, learns=False)
        self.valid = {True: _valid_first(self.in_student), False: _valid_first(self.in_teacher)}
        R = len(self.layouts[0].group)
        spare = torch.full((R + 1,), -1, dtype=torch.int32, device=self.device)
        valid = self.starts.chunk >= 0
        events = torch.arange(len(valid), dtype=torch.int32, device=self.device)
        # The start that is at each of the student's rows; what is padding goes to a spare entry.
        self.event_of_row = spare.scatter(0, torch.where(valid, self.starts.student_row, R), events)[:R]

    def _float(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _programs(self, per_processor: int, most: int) -> int:
        return max(1, min(processors(self.device) * per_processor, most))

    def live_bits(self, live: Live, before: Tensor, token: Tensor) -> Tensor:
        """Return the live sets of the starts' events, `[E, W]` int32."""
        bits = torch.empty((len(before), live.words), dtype=torch.int32, device=self.device)
        table = live.table
        conditioned = (self.starts.at_cut & self.options.conditioning).to(torch.uint8)
        start_kernels.chain_live_kernel[(len(before),)](
            before, token, self.starts.chunk, conditioned, bits, live.base, live.heavy,
            live.stored, table.tail, table.head, live.joined, live.position_start, live.by_position, table.point,
            table.low, table.high, table.rule_start, table.tail_start, table.tail_count, table.right, live.heads,
            live.words, table.depth, WORDS=WORDS, RULES=RULES, TOKENS=TOKENS,
            num_warps=LIVE_WARPS,
        )  # fmt: skip
        return bits

    def start_values(
        self, student: Rows, teacher: Rows, targets: Tensor | None, values: Tensor
    ) -> tuple[StartResults, Tensor | None, Tensor | None]:
        """Compute the starts' values into `values [B * P]`; with targets cross-entropy and hits, `[B, T_s]`."""
        plan, starts = self.plan, self.starts
        B, T_s = student.logits.shape[:2]
        E, M, V_head = len(starts.chunk), plan.others, student.logits.shape[2]
        bits = (
            self.live_bits(plan.student.live, starts.teacher_before, starts.student_token),
            self.live_bits(plan.teacher.live, starts.student_before, starts.teacher_token),
        )
        half = student.logits.dtype == torch.bfloat16  # float16 has not the range
        ratio = self._float(E, M, dtype=torch.bfloat16 if half else torch.float32)
        head_lse, mass, s_lse, t_lse = (self._float(n) for n in (B * T_s, E, E, E))
        losses = None if targets is None else self._float(B, T_s)
        hits = None if targets is None else torch.empty((B, T_s), dtype=torch.bool, device=self.device)
        programs = self._programs(PROGRAMS_PER_PROCESSOR, B * T_s)
        sizes = [side.segments.capacity for side in (plan.student, plan.teacher)]
        sums = [self._float(programs, size) for size in sizes]
        start_kernels.chain_start_kernel[(programs,)](
            student.logits, teacher.logits, targets, self.event_of_row, starts.teacher_row, *bits, plan.partner,
            *_segments(plan.student.segments)[:9], *_segments(plan.teacher.segments)[:9], *sums, *sizes, ratio,
            losses, hits, head_lse, values, mass, s_lse, t_lse,
            B * T_s, T_s, teacher.positions, V_head, student.width, teacher.width, M, plan.student.live.words,
            plan.teacher.live.words, *student.strides, *teacher.strides, self.scale,
            TARGETS=targets is not None, BLOCK=START_BLOCK, **_tiles(), num_warps=START_WARPS,
        )  # fmt: skip
        return StartResults(*bits, ratio, head_lse, mass, s_lse, t_lse), losses, hits

    def start_gradient(
        self,
        student: Rows,
        teacher: Rows,
        targets: Tensor | None,
        kept: StartResults,
        of_losses: Tensor | None,
        of_values: Tensor,
    ) -> Tensor:
        """Return the gradient of cross-entropy and starts, `[B, T_s, V_head]`."""
        plan = self.plan
        B, T_s, V_head = student.logits.shape
        gradient = torch.empty((B, T_s, V_head), dtype=student.logits.dtype, device=self.device)
        start_kernels.chain_start_bwd_kernel[(B * T_s, triton.cdiv(V_head, GRADIENT_BLOCK))](
            student.logits, teacher.logits, targets, self.event_of_row, self.starts.teacher_row, kept.student_bits,
            kept.teacher_bits, plan.partner, kept.ratio, kept.head_lse, kept.mass, kept.student_lse, kept.teacher_lse,
            of_losses, of_values, gradient, T_s, teacher.positions, V_head, student.width, plan.others,
            plan.student.live.words, plan.teacher.live.words, *student.strides, *teacher.strides, self.scale,
            TARGETS=of_losses is not None, BLOCK=GRADIENT_BLOCK, num_warps=GRADIENT_WARPS,
        )  # fmt: skip
        return gradient

    def node_values(self, student: Rows, teacher: Rows, *, learns: bool) -> NodeResults:
        """Compute the values of the nodes inside the student's tokens (`learns`) or the teacher's."""
        inner, holder, fresh, side, other = self._roles(student, teacher, learns)
        E = len(inner.chunk)
        value, mass, held_lse, fresh_lse, rest = (self._float(E) for _ in range(5))
        if E:
            buffers = _Buffers(self, side.nodes, other.segments, E)
            node_kernels.chain_node_kernel[(buffers.programs,)](
                holder.logits, fresh.logits, *self.valid[learns], inner.student_row, inner.teacher_row, inner.node,
                *_nodes(side.nodes), other.root, other.lookup, *_segments(other.segments),
                buffers.flags(), buffers.sums, buffers.node_sums, *buffers.capacities,
                value, mass, held_lse, fresh_lse, rest, holder.positions, fresh.positions, fresh.width,
                self.plan.classes, *holder.strides, *fresh.strides, self.scale,
                HOLDER_LEARNS=learns, BLOCK=BLOCK, SLOTS=SLOTS, FEW=FEW, **_tiles(), num_warps=NODE_WARPS,
            )  # fmt: skip
        return NodeResults(value, mass, held_lse, fresh_lse, rest)

    def add_gradient_of_students_nodes(
        self, student: Rows, teacher: Rows, kept: NodeResults, of_values: Tensor, gradient: Tensor
    ) -> None:
        """Add the gradients of the nodes inside the student's tokens."""
        inner, holder, fresh, side, other = self._roles(student, teacher, True)
        E, chunks = len(inner.chunk), len(self.layouts[1].first)
        if E and chunks:
            buffers = _Buffers(self, side.nodes, other.segments, chunks)
            ratio = self._float(buffers.programs, side.nodes.most_slots)
            node_kernels.chain_holder_bwd_kernel[(buffers.programs,)](
                holder.logits, fresh.logits, gradient, inner.chunk, self.layouts[1].first, self.layouts[1].size,
                inner.student_row, inner.teacher_row, inner.node, *_nodes(side.nodes), side.nodes.member_slot,
                other.lookup, *_segments(other.segments), ratio, buffers.sums, buffers.node_sums,
                *buffers.capacities, side.nodes.most_slots, kept.mass, kept.held_lse, kept.fresh_lse, kept.rest,
                of_values, chunks, E, holder.positions, fresh.positions, gradient.shape[2], *holder.strides,
                *fresh.strides, self.scale, SLOTS=SLOTS, FEW=FEW, **_tiles(), num_warps=NODE_WARPS,
            )  # fmt: skip

    def add_gradient_of_teachers_nodes(
        self, student: Rows, teacher: Rows, kept: NodeResults, of_values: Tensor, gradient: Tensor
    ) -> None:
        """Add the gradients of the nodes inside the teacher's tokens."""
        inner, holder, fresh, side, other = self._roles(student, teacher, False)
        E, C = len(inner.chunk), self.plan.classes
        if E:
            buffers = _Buffers(self, side.nodes, other.segments, E)
            ratio = self._float(buffers.programs, side.nodes.most_slots)
            node_kernels.chain_fresh_bwd_kernel[(buffers.programs,)](
                holder.logits, fresh.logits, gradient, *self.valid[False], inner.student_row, inner.teacher_row,
                inner.node, *_nodes(side.nodes), other.root, other.lookup, *_segments(other.segments),
                buffers.flags(), ratio, buffers.sums, buffers.node_sums, *buffers.capacities, side.nodes.most_slots,
                kept.mass, kept.held_lse, kept.fresh_lse, kept.rest, of_values, holder.positions, fresh.positions,
                fresh.width, gradient.shape[2], C, *holder.strides, *fresh.strides, self.scale,
                BLOCK=BLOCK, SLOTS=SLOTS, FEW=FEW, **_tiles(), num_warps=NODE_WARPS,
            )  # fmt: skip

    def sums_of_nodes(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the sums of nodes by part and chunk, `[2, B * P]`, in a fixed order."""
        chunks = self.shape[0] * self.shape[1]
        sums = self._float(2, chunks)
        block = 128
        node_kernels.chain_node_sums_kernel[(triton.cdiv(max(chunks, 1), block),)](
            student, self.in_student.chunk, self.in_student.at_end.to(torch.uint8), self.layouts[1].first,
            self.layouts[1].size, len(student), teacher, self.in_teacher.chunk, self.in_teacher.at_end.to(torch.uint8),
            self.layouts[0].first, self.layouts[0].size, len(teacher), sums, chunks, BLOCK=block,
        )  # fmt: skip
        return sums

    def of_nodes(self, inner: Inner, of_parts: Tensor) -> Tensor:
        """Return the upstream gradient of every node.

        Args:
            inner: The nodes.
            of_parts: `[3, B * P]`, of the parts.
        """
        index = inner.part_number() * of_parts.shape[1] + inner.chunk.clamp(min=0)
        return of_parts.view(-1).gather(0, index)

    def _roles(self, student: Rows, teacher: Rows, learns: bool) -> tuple[Inner, Rows, Rows, SideLayout, SideLayout]:
        if learns:
            return self.in_student, student, teacher, self.plan.student, self.plan.teacher
        return self.in_teacher, teacher, student, self.plan.teacher, self.plan.student


class _Buffers:
    """Memory of the programs that go through nodes: flags by class, sums by segment of classes and of slots."""

    def __init__(self, comparison: Comparison, nodes: Nodes, segments: Segments, most: int) -> None:
        self.programs = comparison._programs(NODE_PROGRAMS_PER_PROCESSOR, most)
        self.capacities = segments.capacity, nodes.most_segments
        self.sums, self.node_sums = (comparison._float(self.programs, max(n, 1)) for n in self.capacities)
        self._classes, self._device = comparison.plan.classes, comparison.device
        self._dtype = torch.int16 if nodes.most_slots < 1 << 15 else torch.int32

    def flags(self) -> Tensor:
        """Return marks that are not set, by program and class."""
        return torch.zeros((self.programs, self._classes + 1), dtype=self._dtype, device=self._device)


def _valid_first(inner: Inner) -> tuple[Tensor, Tensor]:
    """Return the nodes' indices, int32, those that are not padding first, and how many these are."""
    padding = inner.chunk < 0
    return torch.argsort(padding.to(torch.uint8), stable=True).to(torch.int32), (~padding).sum().to(torch.int32)


def _segments(segments: Segments) -> tuple[Any, ...]:
    s = segments
    return (
        s.wide, s.rows, s.member, s.offset, s.height, s.slices, s.start, s.count, s.index, s.token_start, s.token
    )  # fmt: skip


def _tiles() -> dict[str, int]:
    return {"SEGMENT": layout.SEGMENT, "ROWS": layout.WIDE_ROWS, "SLICE": layout.SLICE}


def _nodes(nodes: Nodes) -> tuple[Tensor, ...]:
    return tuple(getattr(nodes, field.name) for field in fields(nodes))[:5]
