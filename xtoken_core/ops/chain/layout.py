"""Static tables of the chain kernels, derived once from the chain tables of a pair of tokenizers.

A class is *plain* if it has one token on each side: it is compared element by element. All others are numbered from 0
to `M - 1`, and compared in blocks by the larger of their two sizes: a lane, a few lanes or many lanes for a class.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from xtoken_core.chain.class_layout import class_layout
from xtoken_core.chain.tables import ChainTables, SideTable
from xtoken_core.ops.chain.live_layout import Live, as_int32, live_layout

NODE_SEGMENT = 32
"""Most tokens of a segment of a node's slot."""


@dataclass(frozen=True)
class SlotTokens:
    """Tokens of one side by slot.

    Attributes:
        segment_start: `[S + 1]` int32, where a slot's segments begin.
        start: `[segments + 1]` int32, where a segment's tokens begin.
        token: `[m]` int32 tokens, by node and slot.
        slot: `[m]` int32 slot of each.
        node_start: `[N + 1]` int32, where a node's tokens begin.
        most_segments: The most segments that a node has.
        most_tokens: The most tokens that a node has.
    """

    segment_start: Tensor
    start: Tensor
    token: Tensor
    slot: Tensor
    node_start: Tensor
    most_segments: int
    most_tokens: int

    @property
    def segments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens by segment, in the order of the kernels' arguments."""
        return self.segment_start, self.start, self.token


@dataclass(frozen=True)
class Nodes:
    """One side's nodes.

    Attributes:
        slot_start: `[N + 1]` int32, where a node's slots begin.
        slot_class: `[S]` int32, -1 = "ends here".
        held: The side's own tokens by slot.
        fresh: The other side's tokens of each slot's class.
        spelling_start: `[V + 1]` int32, where a token's pieces begin.
        spelled_node: `[n]` int32, the node reached with each piece that holds the token; -1 = none. Unlike
            `SideTable.node`, also with the last piece of a token whose end has no term: the node holds it.
        spelled_slot: `[n]` int32, the token's slot at that node.
        most_slots: The most slots that a node has.
    """

    slot_start: Tensor
    slot_class: Tensor
    held: SlotTokens
    fresh: SlotTokens
    spelling_start: Tensor
    spelled_node: Tensor
    spelled_slot: Tensor
    most_slots: int

    @property
    def slots(self) -> tuple[Tensor, Tensor]:
        """First slots of nodes and classes of slots, in the order of the kernels' arguments."""
        return self.slot_start, self.slot_class

    @property
    def spelled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Nodes of every token's pieces, likewise."""
        return self.spelling_start, self.spelled_node, self.spelled_slot


@dataclass(frozen=True)
class SideLayout:
    """Static arrays of one tokenizer for the chain kernels.

    Attributes:
        root: `[V]` int32 class of each token.
        members: `[n]` int32 tokens of classes that are not plain, in the order of `class_layout`; 0 = none, whose bit
            no live set has.
        nodes: Its nodes.
        live: Its live sets.
    """

    root: Tensor
    members: Tensor
    nodes: Nodes
    live: Live


@dataclass(frozen=True)
class ChainLayout:
    """Static arrays of a tokenizer pair for the chain kernels.

    Attributes:
        student: The student's.
        teacher: The teacher's.
        partner: `[V_s]` int32, the teacher's token of a plain class; `-1 - m` in another.
        blocks: `[blocks, 7]` int32, as in `class_layout`.
        others: `M`, how many classes are not plain.
        classes: `C`.
    """

    student: SideLayout
    teacher: SideLayout
    partner: Tensor
    blocks: Tensor
    others: int
    classes: int


def chain_layout(tables: ChainTables) -> ChainLayout:
    """Return the layout of a pair's tables, on their device; it is built once per tables and kept with them."""
    kept: ChainLayout | None = tables.__dict__.get("_layout")
    if kept is None:
        kept = _build(tables)
        object.__setattr__(tables, "_layout", kept)
    return kept


def _build(tables: ChainTables) -> ChainLayout:
    device = tables.student.root.device
    sides = tables.student, tables.teacher
    C = tables.classes
    roots = [side.root.cpu().numpy().astype(np.int64) for side in sides]
    classes = class_layout(roots[0], roots[1], C)
    plain, M = classes.plain, int(classes.number.max()) + 1
    # By class first: -1 - m of one that is not plain; a plain one's teacher token. Then by the student's tokens.
    partner = -1 - classes.number
    partner[roots[1][plain[roots[1]]]] = np.flatnonzero(plain[roots[1]])
    by_class = [_by_class(root, C + 1) for root in roots]
    partner = partner[roots[0]]
    columns = [np.full(len(root), -1) for root in roots]  # the student's have none but their own
    columns[1][partner[partner >= 0]] = np.flatnonzero(partner >= 0)
    layouts = []
    for k, side in enumerate(sides):
        members = classes.members[k]
        layouts.append(
            SideLayout(
                root=as_int32(roots[k], device),
                members=as_int32(np.maximum(members, 0), device),
                nodes=_nodes(side, by_class[1 - k], device),
                live=live_layout(side.live, columns[k], members, k * len(roots[0]), device),
            )
        )
    return ChainLayout(layouts[0], layouts[1], as_int32(partner, device), as_int32(classes.blocks, device), M, C)


def _by_class(root: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where the tokens of a class begin, `[classes + 1]`, and the tokens by class."""
    start = np.concatenate([[0], np.cumsum(np.bincount(root, minlength=classes))])
    return start, np.argsort(root, kind="stable")


def _nodes(side: SideTable, other: tuple[np.ndarray, np.ndarray], device: torch.device) -> Nodes:
    slot_start = side.slot_start.cpu().numpy().astype(np.int64)
    member_slot, member = side.member_slot.cpu().numpy().astype(np.int64), side.member.cpu().numpy().astype(np.int64)
    slot_class = side.slot_class.cpu().numpy().astype(np.int64)
    # Members by slot in compressed rows: those of slot s are `member[order][own[s] : own[s + 1]]`.
    order = np.argsort(member_slot, kind="stable")
    own = np.concatenate([[0], np.cumsum(np.bincount(member_slot, minlength=len(slot_class)))])
    start, by_class = other
    # The other side's tokens by slot: every slot is expanded to the tokens of its class. `owner` is the slot of each
    # entry, and its index minus the slot's first one counts through the class's tokens. ENDS_HERE has none.
    known = np.maximum(slot_class, 0)
    count = np.where(slot_class >= 0, start[known + 1] - start[known], 0)
    begin = np.concatenate([[0], np.cumsum(count)])
    owner = np.repeat(np.arange(len(slot_class)), count)
    tokens = by_class[start[known][owner] + np.arange(len(owner)) - begin[owner]]
    spelled_node, spelled_slot = _spelled(side, slot_start, member_slot, member)
    return Nodes(
        slot_start=as_int32(slot_start, device),
        slot_class=as_int32(slot_class, device),
        held=_slot_tokens(own, member[order], slot_start, device),
        fresh=_slot_tokens(begin, tokens, slot_start, device),
        spelling_start=as_int32(side.spelling_start.cpu().numpy(), device),
        spelled_node=as_int32(spelled_node, device),
        spelled_slot=as_int32(spelled_slot, device),
        most_slots=int(np.diff(slot_start).max(initial=1)),
    )


def _slot_tokens(begin: np.ndarray, tokens: np.ndarray, slot_start: np.ndarray, device: torch.device) -> SlotTokens:
    """Return tokens by slot, cut into segments.

    Args:
        begin: `[S + 1]`, where a slot's tokens begin.
        tokens: By slot.
        slot_start: `[N + 1]`.
        device: Device of the result.
    """
    size = np.diff(begin)
    count = -(-size // NODE_SEGMENT)
    segment_start = np.concatenate([[0], np.cumsum(count)])
    owner = np.repeat(np.arange(len(size)), count)
    rank = np.arange(len(owner)) - segment_start[owner]
    # Segment r of a slot begins NODE_SEGMENT tokens behind segment r - 1; the last one ends where the slot does.
    start = np.append(begin[:-1][owner] + rank * NODE_SEGMENT, len(tokens))
    node_start = begin[slot_start]
    return SlotTokens(
        segment_start=as_int32(segment_start, device),
        start=as_int32(start, device),
        token=as_int32(tokens, device),
        slot=as_int32(np.repeat(np.arange(len(size)), size), device),
        node_start=as_int32(node_start, device),
        most_segments=int(np.diff(segment_start[slot_start]).max(initial=1)),
        most_tokens=int(np.diff(node_start).max(initial=1)),
    )


def _spelled(
    side: SideTable, slot_start: np.ndarray, slot: np.ndarray, member: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the node that is reached with each piece, `[n]`, -1 = none, and the token's slot there.

    A member's place in its spelling is its node's depth, which is that of any token that continues from the node.
    """
    start, reached = side.spelling_start.cpu().numpy().astype(np.int64), side.node.cpu().numpy().astype(np.int64)
    rank = np.arange(len(reached)) - np.repeat(start[:-1], np.diff(start))
    depth = np.zeros(len(slot_start) - 1, np.int64)
    depth[reached[reached >= 0]] = rank[reached >= 0]
    owner = np.searchsorted(slot_start, slot, side="right") - 1
    at = start[member] + depth[owner]
    node, slots = np.full(len(reached), -1), np.zeros(len(reached), np.int64)
    node[at], slots[at] = owner, slot
    return node, slots
