"""Events of the chain divergence: starts of chunks, and nodes inside a chunk's only token of one side."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from xtoken_core.chain.tables import SideTable

T = TypeVar("T", bound="Events")


@dataclass(frozen=True)
class Layout:
    """One side's chunks.

    Attributes:
        first: `[B * P]` int64, place of a chunk's first token in the flattened `[B, T]`.
        size: `[B * P]` int64, its tokens; 0 for a chunk that is not compared: it is empty, not usable, in pieces, or
            its first token is the first of the sample, which nothing predicts.
        ids: `[B * T]` int64, all tokens.
        chunk: `[B * T]` int64, each token's chunk within its sample, -1 = none.
    """

    first: Int[Tensor, " BP"]
    size: Int[Tensor, " BP"]
    ids: Int[Tensor, " BT"]
    chunk: Int[Tensor, " BT"]


def lay_out(chunk_id: Int[Tensor, "B T"], ids: Int[Tensor, "B T"], usable: Bool[Tensor, "B P"]) -> Layout:
    """Find where each chunk lies.

    Args:
        chunk_id: Chunk of each token, not shifted.
        ids: The tokens.
        usable: Chunks that count.
    """
    (B, T), P = chunk_id.shape, usable.shape[1]
    place = torch.arange(B * T, device=ids.device).view(B, T)
    inside = (chunk_id >= 0) & (chunk_id < P)
    # Tokens of no chunk go to a spare entry, so that nothing depends on how many there are.
    group = torch.where(inside, chunk_id + P * torch.arange(B, device=ids.device).unsqueeze(1), B * P).flatten()
    spare = torch.zeros(B * P + 1, dtype=torch.int64, device=ids.device)
    size = spare.index_add(0, group, torch.ones_like(group))[:-1]
    first = (spare + B * T).scatter_reduce(0, group, place.flatten(), "amin")[:-1]
    last = (spare - 1).scatter_reduce(0, group, place.flatten(), "amax")[:-1]
    whole = (last - first + 1 == size) & (first % T > 0) & usable.flatten()
    return Layout(first, torch.where(whole, size, 0), ids.flatten(), chunk_id.flatten())


@dataclass(frozen=True)
class Events:
    """Comparisons of one row of the student with one of the teacher.

    Attributes:
        chunk: `[E]` int64, place of the chunk in the flattened `[B, P]`.
        student_row: `[E]` int64, place in the flattened `[B, T_s]` of the position whose logits count.
        teacher_row: `[E]` int64, likewise.
    """

    chunk: Int[Tensor, " E"]
    student_row: Int[Tensor, " E"]
    teacher_row: Int[Tensor, " E"]

    def part(self: T, which: slice) -> T:
        """Return some of them."""
        return replace(self, **{field.name: getattr(self, field.name)[which] for field in fields(self)})


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


@dataclass(frozen=True)
class Inner(Events):
    """Nodes inside tokens of one side.

    Attributes:
        node: `[E]` int64.
    """

    node: Int[Tensor, " E"]

    def swapped(self) -> Inner:
        """Return the same with the sides exchanged."""
        return replace(self, student_row=self.teacher_row, teacher_row=self.student_row)


def find_starts(student: Layout, teacher: Layout) -> Starts:
    """List the starts of all chunks."""
    chunk = torch.nonzero((student.size > 0) & (teacher.size > 0)).squeeze(1)
    rows = student.first[chunk] - 1, teacher.first[chunk] - 1
    before = student.chunk[rows[0]], teacher.chunk[rows[1]]
    return Starts(
        chunk=chunk,
        student_row=rows[0],
        teacher_row=rows[1],
        student_token=student.ids[rows[0] + 1],
        teacher_token=teacher.ids[rows[1] + 1],
        student_before=student.ids[rows[0]],
        teacher_before=teacher.ids[rows[1]],
        at_cut=(before[0] >= 0) & (before[0] == before[1]),
    )


def find_inner(
    holder: Layout, other: Layout, side: SideTable, *, end_terms: bool, bare_space: bool, learns: bool
) -> Inner:
    """List the nodes inside the chunks in which one side has one token.

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
    chunk = torch.nonzero((holder.size == 1) & (other.size > 0)).squeeze(1)
    if not len(side.bare_space):  # no token can be distinguished on the way
        return Inner(*(chunk[:0],) * 4)
    size = other.size[chunk]
    owner = torch.repeat_interleave(torch.arange(len(chunk), device=chunk.device), size)  # [N], tokens of all chunks
    begin = size.cumsum(0) - size
    rank = torch.arange(len(owner), device=chunk.device) - begin[owner]
    row = other.first[chunk][owner] + rank
    token = holder.ids[holder.first[chunk]]
    start, end = side.spelling_start[token].long(), side.spelling_start[token + 1].long()
    at = start[owner] + rank
    there = at < end[owner]
    at = torch.where(there, at, 0)
    differs = ~(there & (side.piece[at] == other.ids[row]))
    differing = differs.long().cumsum(0)
    # No token of the chunk up to and with this one differs from the spelling.
    kept = differing == (differing - differs.long())[begin][owner]
    node = side.node[at].long()
    kept &= node >= 0
    node = node.clamp(min=0)
    if not end_terms:
        kept &= rank + 1 < size[owner]
    if not bare_space:
        kept &= ~side.bare_space[node]
    if learns:
        kept &= side.slot_start[node + 1] - side.slot_start[node] > 1
    found = torch.nonzero(kept).squeeze(1)
    of_chunk = chunk[owner[found]]
    return Inner(of_chunk, holder.first[of_chunk] - 1, row[found], node[found])
