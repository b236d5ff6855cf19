"""The launches behind the Triton backend of `chain_topk`: entries of lists, buffers, grids and the sizes of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from xtoken_core.chain.tables import ChainTables
from xtoken_core.ops.chain import start_kernels
from xtoken_core.ops.chain.events import SideTokens
from xtoken_core.ops.chain.launch import Comparison, Rows
from xtoken_core.ops.chain_topk import entry_kernels, gradient_kernels, node_kernels, student_kernels
from xtoken_core.ops.chain_topk.reference import ChainTopKSettings
from xtoken_core.ops.side_stream import join, second_stream
from xtoken_core.ops.triton_support import power_of_2

# An entry is a listed token of a row of the teacher; a program holds all entries of a row, its lanes.
RULES = 16
"""Rules that are read at once, for all entries of a row."""
ENTRIES, TOKENS = 16, 32
"""Entries whose classes are read at once, and tokens of each."""
STUDENT_LANES, GRADIENT_LANES = 512, 256
"""Lanes over a row, of `start_kernels.ADJACENT` logits each."""
GRADIENT_TILES = 8
"""Tiles of a program that stores a gradient."""
BLOCK, SLOTS, CHUNKS = 1024, 512, 32
"""Logits of a row and slots of a node that are read at once by a node's program; chunks of a program that adds up."""
COMPARED = 4096
"""Most pairs of a slot and an entry that are compared at once."""
LEAST_LANES = 16
ENTRY_WARPS, HEAD_WARPS, START_WARPS, STUDENT_WARPS, NODE_WARPS, GRADIENT_WARPS = 4, 4, 4, 16, 8, 8
NODE_PROGRAMS_PER_PROCESSOR, NODE_GRADIENT_PROGRAMS_PER_PROCESSOR = 8, 16


class StudentClasses(NamedTuple):
    """The student's tokens by class.

    Attributes:
        start: `[C + 2]` int32, where a class's tokens begin.
        token: `[V_s]` int32, the tokens by class.
    """

    start: Tensor
    token: Tensor

    @classmethod
    def of(cls, tables: ChainTables) -> StudentClasses:
        """Sort the tokens."""
        root = tables.student.root.long()
        sizes = torch.bincount(root, minlength=tables.classes + 1)
        start = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        return cls(start.int(), root.argsort(stable=True).int())


def student_classes(tables: ChainTables) -> StudentClasses:
    """Return the student's tokens by class, on the tables' device; built once per tables and kept with them."""
    kept: StudentClasses | None = tables.__dict__.get("_student_classes")
    if kept is None:
        kept = StudentClasses.of(tables)
        # Kept in the frozen tables themselves, so that it goes with them and is never of other ones.
        object.__setattr__(tables, "_student_classes", kept)
    return kept


@dataclass(frozen=True)
class Lists:
    """The teacher's listed tokens at every position of the flattened `[B, T_t]`, in the order of their classes.

    Attributes:
        ids: `[R, K]` int32; `V_t` in an empty entry.
        classes: `[R, K]` int32, ascending; `C + 1` in an empty entry.
        log_probs: `[R, K]` float32; -inf in an empty entry.
        tail: `[R]` float32, the mass of the tokens that are not listed.
        part: `[R]` float32, an equal part of it for each of these.
    """

    ids: Tensor
    classes: Tensor
    log_probs: Tensor
    tail: Tensor
    part: Tensor

    @classmethod
    def of(cls, log_probs: Tensor, ids: Tensor, tail: Tensor, tables: ChainTables) -> Lists:
        """Sort the entries; arguments as for the op."""
        # Sorted by class, tokens of one class are neighbours: kernels sum them without a table of classes.
        root = tables.teacher.root
        V = len(root)
        ids, log_probs = ids.flatten(0, 1), log_probs.flatten(0, 1)
        known = (ids >= 0) & (ids < V)
        # Empty entries sort behind all classes; class C is of tokens without a root.
        classes = torch.where(known, root[ids.clamp(0, V - 1)], tables.classes + 1).int()
        classes, order = classes.sort(dim=1, stable=True)
        tail = tail.flatten().float()
        return cls(
            torch.where(known, ids, V).gather(1, order).int(),
            classes,
            log_probs.float().masked_fill(~known, -torch.inf).gather(1, order),
            tail,
            # With every token listed there is no other one, and the tail is 0.
            tail / (V - known.sum(1)).clamp(min=1),
        )

    @property
    def size(self) -> int:
        """`K`."""
        return self.ids.shape[1]

    @property
    def lanes(self) -> int:
        """Lanes that hold a row's entries."""
        return max(power_of_2(self.size), LEAST_LANES)

    @property
    def tile(self) -> int:
        """Slots that are compared with a row's entries at once."""
        return max(COMPARED // self.lanes, 1)


class RowResults(NamedTuple):
    """Values of the rows and starts that their gradient needs.

    Attributes:
        bits: `[E, W]` int32, the student's tokens that can follow.
        rest_bits: `[E, W]` int32, those of them of whose class no token is listed.
        heads: `[E, K]`, the teacher's probability of a class at its head; -1 at other entries.
        ratio: `[E, K]`, at a head that over the student's.
        rest_ratio: `[E]`, that of the classes without a head.
        mass: `[E]`, the teacher's mass of the classes in which the student's is not below the floor.
        head_lse: `[B * T_s]`, of the student's whole head at temperature 1.
        top: `[B * T_s]`, the largest logit of a row's tokens of the tables.
        total: `[B * T_s]`, its sum of `exp(logit - top)`.
        s_lse: `[E]`, of the live tokens.
    """

    bits: Tensor
    rest_bits: Tensor
    heads: Tensor
    ratio: Tensor
    rest_ratio: Tensor
    mass: Tensor
    head_lse: Tensor
    top: Tensor
    total: Tensor
    s_lse: Tensor


class ListedNodes(NamedTuple):
    """Values of nodes, and what their gradient needs, by event.

    Attributes:
        value: `[E]`, the KL.
        mass: `[E]`, the teacher's mass of the slots in which the student's is not below the floor.
        level: `[E]`, inside the student's tokens `log sum exp` of the holder's, else `mass` less the ratio of the
            classes that no slot names.
        listed: `[E]`, the fraction of the teacher's mass that its listed tokens have.
        ratio: `[E, most_slots]`, the teacher's probability of a slot over the student's.
    """

    value: Tensor
    mass: Tensor
    level: Tensor
    listed: Tensor
    ratio: Tensor


class Kept(NamedTuple):
    """Values of a call that its gradient needs."""

    rows: RowResults
    inside: ListedNodes
    beside: ListedNodes
    classes: Tensor


class Outputs(NamedTuple):
    """Results of `ListedComparison.forward`.

    Attributes:
        parts: `[3, B * P]`.
        listed: `[B * P]`, the least at a chunk's nodes.
        losses: `[B, T_s]` or None.
        hits: `[B, T_s]` or None.
    """

    parts: Tensor
    listed: Tensor
    losses: Tensor | None
    hits: Tensor | None


class ListedComparison(Comparison):
    """One call's events, and the launches over them; logits and lists pass through and are not kept."""

    def __init__(self, tables: ChainTables, sides: tuple[SideTokens, SideTokens], settings: ChainTopKSettings) -> None:
        """Find the events, without waiting for the device."""
        common = settings.max_chunks, settings.options, settings.temperature, settings.generated
        super().__init__(tables, sides, *common)
        self.settings = settings
        self.by_class = student_classes(tables)
        self.targets = sides[0].predicted.long().contiguous()

    def forward(self, logits: Tensor, given: Lists) -> tuple[Outputs, Kept]:
        """Compute the parts of every chunk, and what the gradient needs."""
        student = Rows(logits, len(self.tables.student.root))
        E, K = len(self.starts.chunk), given.size
        bits, _, _ = self.live_bits(self.plan.student.live, self.starts.teacher_before, self.starts.student_token)
        rest_p, heads, rest_bits = self._heads(bits, given)
        rows, rest, losses, hits = self._rows(student, bits, rest_bits)
        # Nodes are few programs that wait for memory: starts run beside them.
        with second_stream(self.device):
            inside = self._inside(student, given)
            beside = self._beside(student, given, rows)
        value, mass, rest_ratio = (self._float(E) for _ in range(3))
        ratio = self._float(E, K)
        inputs = logits, given.classes, heads, rest_p, *self.starts.rows, bits, rows["s_lse"], *rest
        results = value, mass, ratio, rest_ratio, self.own
        sizes = student.positions, bits.shape[1], K, *student.strides, self.scale
        entry_kernels.chain_listed_start_kernel[(E,)](
            *inputs, *self.by_class, *results, *sizes, ENTRIES, TOKENS, self.form, num_warps=START_WARPS
        )
        join(self.device)
        of_starts = RowResults(
            bits=bits, rest_bits=rest_bits, heads=heads, ratio=ratio, rest_ratio=rest_ratio, mass=mass, **rows
        )
        outputs = Outputs(*self._parts(value, inside, beside), losses, hits)
        return outputs, Kept(of_starts, inside, beside, given.classes)

    def _heads(self, bits: Tensor, given: Lists) -> tuple[Tensor, Tensor, Tensor]:
        """Return the probability of the rest, those of classes at their heads, and the bits of the rest's tokens."""
        starts, live, E, K = self.starts, self.plan.teacher.live, len(self.starts.chunk), given.size
        p, heads, rest_p = self._float(E, K), self._float(E, K), self._float(E)
        entries = given.ids, given.log_probs, given.tail
        events = starts.chunk, starts.teacher_row, starts.student_before, starts.teacher_token, starts.at_cut
        sets = live.table.tail, live.table.head, live.table.state, live.table.position, *live.rules
        sizes = live.table.state.shape[1], live.table.depth, len(self.tables.teacher.root), K
        constants = self.options.conditioning, RULES, given.lanes
        entry_kernels.chain_entry_kernel[(E,)](
            *entries, *events, *sets, p, rest_p, *sizes, *constants, num_warps=ENTRY_WARPS
        )
        # Starts as all live tokens of the student; the kernel clears those of listed classes.
        rest_bits, groups = bits.clone(), triton.cdiv(K, ENTRIES)
        inputs = given.classes, p, starts.chunk, starts.teacher_row, *self.by_class
        entry_kernels.chain_head_kernel[(E * groups,)](
            *inputs, heads, rest_bits, groups, bits.shape[1], K, ENTRIES, TOKENS, num_warps=HEAD_WARPS
        )
        return rest_p, heads, rest_bits

    def _rows(
        self, student: Rows, bits: Tensor, rest_bits: Tensor
    ) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor], Tensor | None, Tensor | None]:
        """Read the student's rows.

        Returns:
            Values of `RowResults`, `log sum exp` of each start's rest and whether it has a token, losses and hits.
        """
        B, T_s, V_head = student.logits.shape
        E, R, with_losses = len(self.starts.chunk), B * T_s, self.settings.with_cross_entropy
        head_lse, top, total = (self._float(R) for _ in range(3))
        s_lse, rest_lse = self._float(E), self._float(E)
        some = torch.empty(E, dtype=torch.int32, device=self.device)
        losses = self._float(B, T_s) if with_losses else None
        hits = torch.empty((B, T_s), dtype=torch.bool, device=self.device) if with_losses else None
        inputs = student.logits, self.targets, self.event_of_row, bits, rest_bits
        results = losses, hits, head_lse, top, total, s_lse, rest_lse, some
        sizes = T_s, V_head, student.width, bits.shape[1], *student.strides
        constants = with_losses, self.scale == 1.0, STUDENT_LANES
        student_kernels.chain_listed_student_kernel[(R,)](
            *inputs, *results, *sizes, self.scale, *constants, num_warps=STUDENT_WARPS
        )
        rows = {"head_lse": head_lse, "top": top, "total": total, "s_lse": s_lse}
        return rows, (rest_lse, some), losses, hits

    def _inside(self, student: Rows, given: Lists) -> ListedNodes:
        """Compute the nodes inside the student's tokens."""
        inner, nodes = self.in_student, self.plan.student.nodes
        nodal = self._nodes(len(inner.chunk), nodes.most_slots)
        E, held = len(inner.chunk), nodes.held
        if E:
            programs = self._programs(NODE_PROGRAMS_PER_PROCESSOR, E)
            entries = student.logits, given.classes, given.log_probs, given.tail
            tables = *inner.rows, inner.node, *nodes.slots, *held.segments
            scratch = self._float(programs, held.most_segments), held.most_segments
            sizes = E, student.positions, *student.strides, self.scale, given.size
            constants = SLOTS, given.tile, given.lanes, self.form
            node_kernels.chain_listed_inside_kernel[(programs,)](
                *entries,
                *tables,
                *scratch,
                *nodal,
                self.own,
                nodes.most_slots,
                *sizes,
                *constants,
                num_warps=NODE_WARPS,
            )
        return nodal

    def _beside(self, student: Rows, given: Lists, rows: dict[str, Tensor]) -> ListedNodes:
        """Compute the nodes inside the teacher's tokens."""
        inner, nodes = self.in_teacher, self.plan.teacher.nodes
        holder_row, fresh_row = inner.student_row, inner.teacher_row  # as `find_events` lays them out for both sides
        nodal = self._nodes(len(inner.chunk), nodes.most_slots)
        E, held, fresh = len(inner.chunk), nodes.held, nodes.fresh
        if E:
            programs = self._programs(NODE_PROGRAMS_PER_PROCESSOR, E)
            # Bits by class, those of one node at a time: each program sets its own and clears them again.
            flags = torch.zeros((programs, self.plan.classes // 32 + 1), dtype=torch.int32, device=self.device)
            entries = student.logits, given.ids, given.log_probs, given.part
            events = inner.chunk, fresh_row, holder_row, inner.node, self.bounds[0].first
            slots = *nodes.slots, held.segment_start, held.start, *fresh.segments, *nodes.spelled
            of_student = self.plan.student.root, rows["top"], rows["total"]
            scratch = flags, self._float(programs, fresh.most_segments), fresh.most_segments
            widths = E, student.positions, student.width, len(self.tables.teacher.root), flags.shape[1]
            inputs = *entries, *events, *slots, *of_student, *scratch
            constants = *student.strides, self.scale, given.size, BLOCK, SLOTS, given.tile, given.lanes, self.form
            node_kernels.chain_listed_beside_kernel[(programs,)](
                *inputs, *nodal, self.own, nodes.most_slots, *widths, *constants, num_warps=NODE_WARPS
            )
        return nodal

    def _nodes(self, events: int, most_slots: int) -> ListedNodes:
        value, mass, level, listed = (self._float(events) for _ in range(4))
        return ListedNodes(value, mass, level, listed, self._float(events, most_slots))

    def _parts(self, starts: Tensor, inside: ListedNodes, beside: ListedNodes) -> tuple[Tensor, Tensor]:
        """Return the first two of `Outputs`."""
        chunks = self.shape[0] * self.shape[1]
        parts, listed = self._float(3, chunks), self._float(chunks)
        sides = (inside, self.in_student), (beside, self.in_teacher)
        nodes = [(x.value, x.listed, inner.chunk, inner.at_end, len(inner.chunk)) for x, inner in sides]
        bounds = [x for side in self.bounds for x in (side.first, side.size)]
        node_kernels.chain_listed_part_kernel[(triton.cdiv(chunks, CHUNKS),)](
            self.starts.chunk, starts, *nodes[0], *nodes[1], *bounds, parts, listed, chunks, CHUNKS, num_warps=4
        )
        return parts, listed

    def backward(self, logits: Tensor, kept: Kept, of_losses: Tensor | None, of_parts: Tensor) -> Tensor:
        """Return the gradient, `[B, T_s, V_head]`.

        Args:
            logits: The student's.
            kept: From `forward`.
            of_losses: `[B, T_s]` upstream gradient, or None.
            of_parts: `[3, B * P]`, likewise.
        """
        rows, inside, beside, classes = kept
        student = Rows(logits, len(self.tables.student.root))
        B, T_s, V_head = logits.shape
        R, K = B * T_s, classes.shape[1]
        gradient = torch.empty((B, T_s, V_head), dtype=logits.dtype, device=self.device)
        inputs = logits, gradient, self.event_of_row, rows.bits, self.targets
        sums = rows.head_lse, rows.top, rows.total, rows.mass, rows.s_lse, rows.rest_ratio
        upstream = of_losses, of_parts
        nodes = self.in_teacher.chunk, self.in_teacher.at_end, of_parts.shape[1], beside.level
        sizes = len(beside.level), T_s, V_head, student.width
        strides = rows.bits.shape[1], *student.strides, self.scale
        row: tuple[Any, ...] = *inputs, *sums, *upstream, *nodes, *sizes, *strides
        settings = {"CROSS_ENTROPY": of_losses is not None, "UNSCALED": self.scale == 1.0}
        blocks = triton.cdiv(V_head, GRADIENT_TILES * GRADIENT_LANES * start_kernels.ADJACENT.value)
        # Each of the three stores whole gradients over those of the one before: the last has all parts of a token.
        gradient_kernels.chain_listed_row_bwd_kernel[(R * blocks,)](
            *row, blocks, **settings, TILES=GRADIENT_TILES, LANES=GRADIENT_LANES, num_warps=GRADIENT_WARPS
        )
        groups = triton.cdiv(K, ENTRIES)
        of_classes = self.starts.teacher_row, classes, rows.heads, rows.ratio, *self.by_class, K, groups
        gradient_kernels.chain_listed_class_bwd_kernel[(R * groups,)](
            *row, *of_classes, **settings, ENTRIES=ENTRIES, LANES=TOKENS, num_warps=HEAD_WARPS
        )
        if len(inside.value) or len(beside.value):
            own, other = self.plan.student.nodes, self.plan.teacher.nodes
            programs = self._programs(NODE_GRADIENT_PROGRAMS_PER_PROCESSOR, R)
            capacity = own.held.most_tokens, other.fresh.most_tokens
            events, bounds = (self.in_student, self.in_teacher), self.bounds[1]
            lists = self.starts.teacher_row, classes, rows.ratio, rows.rest_bits, self.plan.student.root, K, R
            starts = events[0].chunk, bounds.first, bounds.size, len(inside.value), events[0].node
            held = own.slot_start, own.held.node_start, own.held.token
            of_held = inside.level, inside.mass, inside.ratio, own.most_slots, events[0].at_end
            named = events[1].node, other.slot_start, other.fresh.node_start, other.fresh.token, other.fresh.slot
            of_named = beside.mass, beside.ratio, other.most_slots
            scratch = self._float(programs, sum(capacity)), sum(capacity), capacity[0]
            arguments = *lists, *starts, *held, *of_held, *own.spelled, *named, *of_named, *scratch
            gradient_kernels.chain_listed_node_bwd_kernel[(programs,)](
                *row, *arguments, **settings, STEPS=K.bit_length(), SLOTS=SLOTS, num_warps=NODE_WARPS
            )
        return gradient
