"""The launches behind the Triton backend of `chain`: events, buffers, grids and the sizes of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from xtoken_core.chain import class_layout
from xtoken_core.chain.tables import ChainTables
from xtoken_core.ops.chain import class_kernels, gradient_kernels, live_kernels, node_kernels, start_kernels
from xtoken_core.ops.chain.divergences import Generated
from xtoken_core.ops.chain.event_launch import find_events
from xtoken_core.ops.chain.events import Inner, SideTokens
from xtoken_core.ops.chain.layout import ChainLayout, SideLayout, chain_layout
from xtoken_core.ops.chain.live_layout import Live
from xtoken_core.ops.chain.reference import ChainOptions
from xtoken_core.ops.side_stream import join, second_stream
from xtoken_core.ops.triton_support import processors, row_strides

# Live sets: `chain_live_kernel` copies a start's bits, programs of `chain_clear_kernel` clear what its rules exclude.
WORDS = 2048
"""Words of a live set that are copied at once."""
SPLITS = 4
"""Programs that share the rules of one start; with one all others would wait for the token that has most."""
RULES, TOKENS = 8, 128
"""Rules that are read at once, and lanes for the tokens of each one's interval: a mean of 60, thousands in some."""
POINTS, AT_POINT = 32, 32
"""The same for the single position of a rule, which has fewer tokens than an interval: more rules, fewer lanes."""
TEACHER_LANES, STUDENT_LANES = 1024, 512
"""Lanes over a row, of `start_kernels.ADJACENT` logits each."""
CLASS_EVENTS = 8
"""Starts at which a program compares a block of classes."""
BLOCK, SLOTS = 1024, 512
"""Logits of a row, and slots or segments of a node, that are read at once by a node's program."""
CHUNKS, TERMS = 32, 16
"""Chunks of a program that adds up parts, and blocks of classes whose terms it reads at once."""
LIVE_WARPS, TEACHER_WARPS, STUDENT_WARPS, CLASS_WARPS, NODE_WARPS = 4, 8, 16, 4, 8
CLEAR_WARPS = 4
STUDENT_REGISTERS, GRADIENT_REGISTERS = 64, 80
"""Most registers of a thread with generated text: two programs of the first kernel, three of the second at once."""
CLASS_REGISTERS = 96
"""Most registers of a thread that compares classes: one program more at a time on a processor."""
NODE_PROGRAMS_PER_PROCESSOR = 16


LiveBits = tuple[Tensor, Tensor, Tensor]
"""Live sets by token, of plain classes, of members."""


class StartResults(NamedTuple):
    """Values of the rows and starts that their gradient needs.

    Attributes:
        student_bits: `[E, W_s]` int32 live sets.
        teacher_bits: `[E, W_s]` int32, of the teacher's tokens of plain classes at the student's tokens.
        ratio: `[E, M]`, the teacher's probability of a class over the student's; in generated text its logarithm.
        head_lse: `[B * T_s]`.
        top: `[B * T_s]` float32, largest logit of a student's row.
        total: `[B * T_s]` float32, its sum of `exp(logit - top)`.
        teacher_top: `[B * T_t]`, likewise.
        teacher_total: `[B * T_t]`, likewise.
        student_lse: `[E]`, of the live tokens.
        teacher_lse: `[E]`, likewise.
    """

    student_bits: Tensor
    teacher_bits: Tensor
    ratio: Tensor
    head_lse: Tensor
    top: Tensor
    total: Tensor
    teacher_top: Tensor
    teacher_total: Tensor
    student_lse: Tensor
    teacher_lse: Tensor


class NodeResults(NamedTuple):
    """Values of nodes, and what their gradient needs, by event.

    Attributes:
        value: `[E]`, the KL.
        mass: `[E]`, the teacher's mass of the slots in which the student's is not below the floor.
        level: `[E]`, `mass` less the ratio of the classes that no slot names.
        held_lse: `[E]`, of the holder's tokens.
        ratio: `[E, most_slots]`, the teacher's probability of a slot over the student's.
    """

    value: Tensor
    mass: Tensor
    level: Tensor
    held_lse: Tensor
    ratio: Tensor


@dataclass(frozen=True)
class Rows:
    """One side's logits as kernels read them."""

    logits: Tensor
    width: int

    @property
    def strides(self) -> tuple[int, int]:
        """Strides of sample and position."""
        return row_strides(self.logits)

    @property
    def positions(self) -> int:
        """`T`."""
        return self.logits.shape[1]


class Comparison:
    """One call's events, and the launches over them; logits pass through and are not kept."""

    def __init__(
        self,
        tables: ChainTables,
        sides: tuple[SideTokens, SideTokens],
        max_chunks: int,
        options: ChainOptions,
        temperature: float,
        generated: Generated | None = None,
    ) -> None:
        """Find the events, without waiting for the device."""
        # As in `form_kernels`.
        self.form, self.own = 0.0, None
        if generated is not None:
            self.form = 1.0 if generated.beta is None else generated.beta
            self.own = generated.at.to(torch.uint8).contiguous()
        self.tables, self.options, self.scale = tables, options, 1.0 / temperature
        self.plan: ChainLayout = chain_layout(tables)
        self.device = sides[0].chunk.device
        self.shape = sides[0].chunk.shape[0], max_chunks
        events = find_events(sides, max_chunks, tables, options)
        self.bounds, self.starts = events.sides, events.starts
        self.in_student, self.in_teacher = events.in_student, events.in_teacher
        self.event_of_row, self.event_of_teacher_row = events.event_of_row, events.event_of_teacher_row

    def _float(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _programs(self, per_processor: int, most: int) -> int:
        return max(1, min(processors(self.device) * per_processor, most))

    def registers(self, most: int) -> dict[str, int]:
        """Return the launch option that keeps as many programs on a processor as without generated text."""
        return {"maxnreg": most} if self.form else {}

    def _strides(self, first: Rows, second: Rows) -> tuple[int | float, ...]:
        """Return both sides' strides and the scale, with which the kernels' arguments end."""
        return *first.strides, *second.strides, self.scale

    def live_bits(self, live: Live, before: Tensor, token: Tensor) -> LiveBits:
        """Return the live sets of the starts' events, `[E, words]` int32: by token, of plain classes, of members."""
        E = len(before)
        own, plain, members = (torch.empty((E, W), dtype=torch.int32, device=self.device) for W in live.words)
        event = before, token, self.starts.chunk, self.starts.at_cut, own, plain, members
        conditioning = self.options.conditioning
        tables = live.base, live.heavy, live.stored, live.table.tail, live.second
        live_kernels.chain_live_kernel[(E,)](
            *event, *tables, *live.words, len(live.base) - 1, conditioning, WORDS, num_warps=LIVE_WARPS
        )
        if conditioning:
            rules = live.heavy, live.table.tail, live.joined, *live.positions, *live.rules, live.heads
            tiles = SPLITS, RULES, TOKENS, POINTS, AT_POINT
            # After the copy, in the same stream: it clears bits that the first kernel has set.
            live_kernels.chain_clear_kernel[(E * SPLITS,)](
                *event, *rules, *live.words, live.table.depth, *tiles, num_warps=CLEAR_WARPS
            )
        return own, plain, members

    def start_values(
        self, student: Rows, teacher: Rows, targets: Tensor | None
    ) -> tuple[StartResults, tuple[Tensor, Tensor], Tensor, Tensor | None, Tensor | None]:
        """Compute rows and starts, but for `compare_classes`.

        Returns:
            The values, both sides' live members, the starts' terms by block of classes, and losses and hits `[B, T_s]`.

        The terms are `[1 + blocks, 3, E]`: KL without the mass's own, mass, and mass that is not below the floor.
        """
        plan, starts = self.plan, self.starts
        B, T_s = student.logits.shape[:2]
        E, M, R_s = len(starts.chunk), plan.others, B * T_s
        # The teacher's live sets and rows do not depend on the student's live sets.
        with second_stream(self.device):
            t_own, t_bits, t_members = self._teacher_live()
            t_top, t_total, t_lse = self.teacher_values(teacher, t_own)
        # On the current stream, beside the teacher's; the student's kernel below needs both.
        s_bits, _, s_members = self._student_live()
        join(self.device)
        head_lse, top, total = (self._float(R_s) for _ in range(3))
        s_lse, terms = self._float(E), self._float(1 + len(plan.blocks), 3, E)
        losses = None if targets is None else self._float(B, T_s)
        hits = None if targets is None else torch.empty((B, T_s), dtype=torch.bool, device=self.device)
        inputs = targets, self.event_of_row, starts.teacher_row, s_bits, t_bits, plan.partner, t_lse
        results = losses, hits, head_lse, top, total, s_lse, terms, self.own
        sizes = E, T_s, teacher.positions, student.logits.shape[2], student.width, s_bits.shape[1]
        flags = targets is not None, self.scale == 1.0, STUDENT_LANES, self.form
        arguments = *inputs, *results, *sizes, *self._strides(student, teacher), *flags
        start_kernels.chain_student_kernel[(R_s,)](
            student.logits, teacher.logits, *arguments, num_warps=STUDENT_WARPS, **self.registers(STUDENT_REGISTERS)
        )
        del t_own  # so that less is held beside the ratios
        # float16 has not the range; the logarithms of generated text are not bounded by what they are multiplied with.
        half = student.logits.dtype == torch.bfloat16 and not self.form
        ratio = self._float(E, M, dtype=torch.bfloat16 if half else torch.float32)
        kept = StartResults(s_bits, t_bits, ratio, head_lse, top, total, t_top, t_total, s_lse, t_lse)
        return kept, (s_members, t_members), terms, losses, hits

    def teacher_values(self, teacher: Rows, live: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums of the teacher's rows and of live tokens; some are still to be filled in."""
        R_t = self.shape[0] * teacher.positions
        t_top, t_total, t_lse = self._float(R_t), self._float(R_t), self._float(len(self.starts.chunk))
        read = self.in_student.chunk, len(self.in_student.chunk)
        results, sizes = (t_top, t_total, t_lse), (teacher.positions, teacher.width, live.shape[1])
        inputs = teacher.logits, self.event_of_teacher_row, *read, live
        start_kernels.chain_teacher_kernel[(R_t,)](
            *inputs, *results, *sizes, *teacher.strides, self.scale, LANES=TEACHER_LANES, num_warps=TEACHER_WARPS
        )
        return t_top, t_total, t_lse

    def _student_live(self) -> LiveBits:
        return self.live_bits(self.plan.student.live, self.starts.teacher_before, self.starts.student_token)

    def _teacher_live(self) -> LiveBits:
        return self.live_bits(self.plan.teacher.live, self.starts.student_before, self.starts.teacher_token)

    def compare(
        self, student: Rows, teacher: Rows, kept: StartResults, bits: tuple[Tensor, Tensor], terms: Tensor
    ) -> tuple[NodeResults, NodeResults]:
        """Return the values of the nodes inside the student's tokens and the teacher's; beside them compare classes."""
        # Nodes are few programs that wait for memory, classes many that compute.
        with second_stream(self.device):
            nodes = [self.node_values(student, teacher, kept, learns=learns) for learns in (True, False)]
        self.compare_classes(student, teacher, kept, bits, terms)
        join(self.device)
        return nodes[0], nodes[1]

    def compare_classes(
        self, student: Rows, teacher: Rows, kept: StartResults, bits: tuple[Tensor, Tensor], terms: Tensor
    ) -> None:
        """Fill in the ratios and terms of the classes that are not plain.

        Args:
            student: Logits.
            teacher: Logits.
            kept: Values of the starts.
            bits: Both sides' live members.
            terms: `[1 + blocks, 3, E]`; the first is that of plain classes.
        """
        plan, blocks = self.plan, len(self.plan.blocks)
        E, M = kept.ratio.shape
        if blocks:
            inputs = *self.starts.rows, *bits, kept.student_lse, kept.teacher_lse
            members = plan.blocks, plan.student.members, plan.teacher.members
            results = kept.ratio, terms, self.own
            sizes = blocks, E, M, student.positions, teacher.positions, bits[0].shape[1], bits[1].shape[1]
            tiles = *class_layout.HEIGHTS, *class_layout.LENGTHS, class_layout.TILE, CLASS_EVENTS, self.form
            arguments = *inputs, *members, *results, *sizes, *self._strides(student, teacher), *tiles
            class_kernels.chain_class_kernel[(triton.cdiv(E, CLASS_EVENTS) * blocks,)](
                student.logits, teacher.logits, *arguments, num_warps=CLASS_WARPS, maxnreg=CLASS_REGISTERS
            )

    def node_values(self, student: Rows, teacher: Rows, starts: StartResults, *, learns: bool) -> NodeResults:
        """Compute the values of the nodes inside the student's tokens (`learns`) or the teacher's."""
        inner, holder, fresh, side, other = self._roles(student, teacher, learns)
        E, nodes = len(inner.chunk), side.nodes
        # The fresh side's rows have their sums already; the holder's are taken over the node's tokens alone.
        sums = (starts.teacher_top, starts.teacher_total) if learns else (starts.top, starts.total)
        value, mass, level, held_lse = (self._float(E) for _ in range(4))
        ratio = self._float(E, nodes.most_slots)
        if E:
            # Scratch is per program, not per node: a node's segments may be as many as a vocabulary has tokens.
            programs = self._programs(NODE_PROGRAMS_PER_PROCESSOR, E)
            # Bits by class, those of one node at a time: each program sets its own and clears them again.
            flags = torch.zeros((programs, self.plan.classes // 32 + 1), dtype=torch.int32, device=self.device)
            held, named = nodes.held, nodes.fresh
            scratch = flags, self._float(programs, held.most_segments), self._float(programs, named.most_segments)
            inputs = *inner.rows, inner.node, *nodes.slots, *held.segments, *named.segments, other.root, *sums
            results = value, mass, level, held_lse, ratio, self.own, nodes.most_slots
            sizes = E, holder.positions, fresh.positions, fresh.width, flags.shape[1]
            arguments = *scratch, held.most_segments, named.most_segments, *results, *sizes
            constants = *self._strides(holder, fresh), learns, BLOCK, SLOTS, self.form
            node_kernels.chain_node_kernel[(programs,)](
                holder.logits, fresh.logits, *inputs, *arguments, *constants, num_warps=NODE_WARPS
            )
        return NodeResults(value, mass, level, held_lse, ratio)

    def parts(self, terms: Tensor, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the parts `[3, B * P]`, and of the starts the masses `[B * P]` and slopes `[2, B * P]`, as in `Kept`.

        Args:
            terms: The starts', `[1 + blocks, 3, B * P]`.
            student: Values of the nodes inside the student's tokens.
            teacher: Likewise inside the teacher's.
        """
        chunks = self.shape[0] * self.shape[1]
        parts, mass = self._float(3, chunks), self._float(chunks)
        slope = self._float(2, chunks) if self.form else None
        # A node inside a token of one side is an event per position of the other, so its chunk has that side's bounds.
        sides = (student, self.in_student, self.bounds[1]), (teacher, self.in_teacher, self.bounds[0])
        nodes = [(v, inner.chunk, inner.at_end, bounds.first, bounds.size, len(v)) for v, inner, bounds in sides]
        starts = self.starts.chunk, self.starts.student_row, self.own, terms, len(terms)
        sizes = {"BLOCK": CHUNKS, "TERMS": TERMS, "FORM": self.form, "num_warps": 4}
        node_kernels.chain_part_kernel[(triton.cdiv(chunks, CHUNKS),)](
            *starts, *nodes[0], *nodes[1], parts, mass, slope, chunks, **sizes
        )
        return parts, mass, slope

    def store_mixtures(
        self, student: Rows, teacher: Rows, kept: StartResults, parts: Tensor, mass: Tensor, slope: Tensor | None
    ) -> None:
        """Store the generalised JSD of starts in generated text, and their mass; the last three are from `parts`."""
        if slope is None or self.form == 1.0:
            return
        starts, (E, M) = self.starts, kept.ratio.shape
        inputs = starts.student_row, starts.teacher_row, kept.student_bits, kept.teacher_bits, self.plan.partner
        values = kept.ratio, kept.student_lse, kept.teacher_lse, slope, parts, mass
        sizes = E, student.positions, teacher.positions, student.width, M, kept.student_bits.shape[1]
        gradient_kernels.chain_mixture_kernel[(E,)](
            *(student.logits, teacher.logits),
            *inputs,
            *values,
            *sizes,
            *self._strides(student, teacher),
            LANES=STUDENT_LANES,
            FORM=self.form,
            num_warps=STUDENT_WARPS,
        )

    def _roles(self, student: Rows, teacher: Rows, learns: bool) -> tuple[Inner, Rows, Rows, SideLayout, SideLayout]:
        if learns:
            return self.in_student, student, teacher, self.plan.student, self.plan.teacher
        return self.in_teacher, teacher, student, self.plan.teacher, self.plan.student
