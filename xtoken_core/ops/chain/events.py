"""Events of the chain divergence: starts of chunks, and nodes inside a chunk's only token of one side."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from xtoken_core.chain.tables import SideTable
from xtoken_core.ops.chain.ragged import sizes_are_readable

T = TypeVar("T", bound="Events")

PARTS = ("start", "inner", "end")
"""The parts of a chunk's divergence: its start, the nodes inside its tokens, the node after its last one."""


@dataclass(frozen=True)
class SideTokens:
    """One side's tokens at the positions that predict them.

    Attributes:
        chunk: `[B, T]` int64, chunk of the token that a position predicts; -1 = none, or one that is not compared.
        predicted: `[B, T]` int64, that token.
        read: `[B, T]` int64, the token that a position has read last.
        read_chunk: `[B, T]` int64, its chunk within its sample, -1 = none.
    """

    chunk: Int[Tensor, "B T"]
    predicted: Int[Tensor, "B T"]
    read: Int[Tensor, "B T"]
    read_chunk: Int[Tensor, "B T"]

    def __getitem__(self, samples: slice) -> SideTokens:
        """Select samples."""
        return SideTokens(self.chunk[samples], self.predicted[samples], self.read[samples], self.read_chunk[samples])


@dataclass(frozen=True)
class Layout:
    """One side's chunks; positions are those of the flattened `[B, T]`.

    Attributes:
        first: `[B * P]` int64, position that predicts a chunk's first token.
        size: `[B * P]` int64, its tokens; 0 for a chunk that is not compared.
        predicted: `[B * T]` int64, as in `SideTokens`.
        read: `[B * T]` int64, likewise.
        read_chunk: `[B * T]` int64, likewise.
        group: `[B * T]` int64, index of each position's chunk in the flattened `[B, P]`; `B * P` = none.
    """

    first: Int[Tensor, " BP"]
    size: Int[Tensor, " BP"]
    predicted: Int[Tensor, " BT"]
    read: Int[Tensor, " BT"]
    read_chunk: Int[Tensor, " BT"]
    group: Int[Tensor, " BT"]


def lay_out(tokens: SideTokens, max_chunks: int) -> Layout:
    """Find where each chunk lies.

    Args:
        tokens: One side; the positions of a chunk are adjacent.
        max_chunks: `P`.
    """
    (B, T), P = tokens.chunk.shape, max_chunks
    device = tokens.chunk.device
    inside = (tokens.chunk >= 0) & (tokens.chunk < P)
    # Positions of no chunk go to a spare entry, so that nothing depends on how many there are.
    group = torch.where(inside, tokens.chunk + P * torch.arange(B, device=device).unsqueeze(1), B * P).flatten()
    spare = torch.zeros(B * P + 1, dtype=torch.int64, device=device)
    size = spare.index_add(0, group, torch.ones_like(group))[:-1]
    position = torch.arange(B * T, device=device)
    first = (spare + B * T).scatter_reduce(0, group, position, "amin")[:-1]
    return Layout(first, size, tokens.predicted.flatten(), tokens.read.flatten(), tokens.read_chunk.flatten(), group)


@dataclass(frozen=True)
class Events:
    """Comparisons of one row of the student with one of the teacher.

    On a GPU their number is that of the positions or chunks, so that nothing waits for the device: the others are
    padding, whose rows and tokens are some valid ones.

    Attributes:
        chunk: `[E]` int64, index of the chunk in the flattened `[B, P]`; -1 = padding.
        student_row: `[E]` int64, place in the flattened `[B, T_s]` of the position whose logits count.
        teacher_row: `[E]` int64, likewise.
    """

    chunk: Int[Tensor, " E"]
    student_row: Int[Tensor, " E"]
    teacher_row: Int[Tensor, " E"]

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Chunk and both sides' rows, in the order of the kernels' arguments."""
        return self.chunk, self.student_row, self.teacher_row

    def part(self: T, which: slice | Tensor) -> T:
        """Select events by slice, index or mask."""
        return replace(self, **{field.name: getattr(self, field.name)[which] for field in fields(self)})

    def without_padding(self: T) -> T:
        """Drop padding where that needs no device synchronisation; otherwise return all events."""
        return self.compact() if sizes_are_readable(self.chunk) else self

    def compact(self: T) -> T:
        """Drop padding; synchronises with a GPU."""
        return self.part(torch.nonzero(self.chunk >= 0).squeeze(1))


@dataclass(frozen=True)
class Starts(Events):
    """Starts of chunks.

    Attributes:
        student_token: `[E]` int64, the chunk's first token.
        teacher_token: `[E]` int64, likewise.
        student_before: `[E]` int64, the token before it.
        teacher_before: `[E]` int64, likewise.
        at_cut: `[E]` bool, the two tokens before it end one chunk, so that both sides have cut the text there.
    """

    student_token: Int[Tensor, " E"]
    teacher_token: Int[Tensor, " E"]
    student_before: Int[Tensor, " E"]
    teacher_before: Int[Tensor, " E"]
    at_cut: Bool[Tensor, " E"]

    def part_number(self) -> Int[Tensor, " E"]:
        """Return each event's index in `PARTS`."""
        return torch.zeros_like(self.chunk)


@dataclass(frozen=True)
class Inner(Events):
    """Nodes inside tokens of one side.

    Attributes:
        node: `[E]` int64.
        at_end: `[E]` bool, the node follows the last token of the chunk.
    """

    node: Int[Tensor, " E"]
    at_end: Bool[Tensor, " E"]

    def part_number(self) -> Int[Tensor, " E"]:
        """Return each event's index in `PARTS`."""
        return 1 + self.at_end.long()

    def swapped(self) -> Inner:
        """Return the events with the sides exchanged."""
        return replace(self, student_row=self.teacher_row, teacher_row=self.student_row)


def find_starts(student: Layout, teacher: Layout) -> Starts:
    """List the starts of all chunks, one entry per chunk."""
    valid = (student.size > 0) & (teacher.size > 0)
    # A chunk that one side lacks is padding: rows 0 exist on both sides.
    rows = torch.where(valid, student.first, 0), torch.where(valid, teacher.first, 0)
    before = student.read_chunk[rows[0]], teacher.read_chunk[rows[1]]
    return Starts(
        chunk=torch.where(valid, torch.arange(len(valid), device=valid.device), -1),
        student_row=rows[0],
        teacher_row=rows[1],
        student_token=student.predicted[rows[0]],
        teacher_token=teacher.predicted[rows[1]],
        student_before=student.read[rows[0]],
        teacher_before=teacher.read[rows[1]],
        at_cut=valid & (before[0] >= 0) & (before[0] == before[1]),
    )


def find_inner(
    holder: Layout, other: Layout, side: SideTable, *, end_terms: bool, bare_space: bool, learns: bool
) -> Inner:
    """List the nodes inside the chunks in which one side has one token, one entry per position of the other side.

    A node counts while the other side's tokens are the token's spelling; where the text was cut otherwise (context can
    move a cut), the rest of the chunk has no nodes.

    Args:
        holder: The side with one token; it is the student's in the result.
        other: The other side.
        side: The holder's tables.
        end_terms: True to include the node after the last token.
        bare_space: True to include nodes after a single space.
        learns: True if the holder is the student, which learns nothing at a node where its tokens continue in one
            way only; where the teacher is the holder, the student does.
    """
    row = torch.arange(len(other.group), device=other.group.device)
    if not len(side.bare_space):  # no token can be distinguished on the way
        return Inner(*(row[:0],) * 4, at_end=row[:0].bool())
    # The last entry is that of positions without a chunk: no token of the holder.
    size = torch.cat([torch.where(other.size > 0, holder.size, 0), holder.size.new_zeros(1)])
    valid = size[other.group] == 1
    chunk = torch.where(valid, other.group, 0)
    holder_row = torch.where(valid, holder.first[chunk], 0)
    first = torch.where(valid, other.first[chunk], row)
    rank = row - first  # how many of the chunk's tokens are before this one
    token = holder.predicted[holder_row]
    start, end = side.spelling_start[token].long(), side.spelling_start[token + 1].long()
    spelled = valid & (start + rank < end)
    # The piece of the holder's spelling beside which this token stands.
    at = torch.where(spelled, start + rank, 0)
    differs = ~(spelled & (side.piece[at] == other.predicted))
    differing = differs.long().cumsum(0)
    # No token of the chunk up to and with this one differs from the spelling.
    kept = valid & (differing == (differing - differs.long())[first])
    node = side.node[at].long()
    kept &= node >= 0
    node = torch.where(kept, node, 0)
    at_end = rank + 1 == other.size[chunk]
    if not end_terms:
        kept &= ~at_end
    if not bare_space:
        kept &= ~side.bare_space[node]
    if learns:
        kept &= side.slot_start[node + 1] - side.slot_start[node] > 1
    # The node's decision is predicted by the position that has read the token.
    following = torch.where(kept, row + 1, 0)
    return Inner(torch.where(kept, chunk, -1), holder_row, following, node, at_end)


def find_events(
    sides: tuple[SideTokens, SideTokens],
    max_chunks: int,
    tables: tuple[SideTable, SideTable],
    *,
    end_terms: bool,
    bare_space: bool,
) -> tuple[Starts, Inner, Inner]:
    """List the starts of all chunks, the nodes inside the student's tokens, and those inside the teacher's.

    Args:
        sides: The student's and the teacher's tokens.
        max_chunks: `P`.
        tables: Both sides' tables.
        end_terms: As for `find_inner`.
        bare_space: As for `find_inner`.
    """
    student, teacher = lay_out(sides[0], max_chunks), lay_out(sides[1], max_chunks)
    in_student = find_inner(student, teacher, tables[0], end_terms=end_terms, bare_space=bare_space, learns=True)
    in_teacher = find_inner(teacher, student, tables[1], end_terms=end_terms, bare_space=bare_space, learns=False)
    return find_starts(student, teacher), in_student, in_teacher.swapped()
