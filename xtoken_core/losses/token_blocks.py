"""Which positions of a micro-batch are multiplied out together: blocks that cut no chunk in two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from xtoken_core.losses.common import ChunkView

BLOCK_ROWS = 2048
"""Student positions of a block, unless a run says otherwise."""
ROUNDING = 128
"""Blocks have a multiple of so many positions, a whole number of a matrix product's tiles."""


@dataclass(frozen=True)
class TeacherBlocks:
    """One teacher's side of N blocks. A teacher with the student's tokenizer has positions alone.

    Attributes:
        rows: Places of its positions in the flattened batch; `B * T_t` and more: none.
        student_chunk_id: Within the block, the chunk of each of its student positions, -1 = none.
        teacher_chunk_id: Likewise of its teacher positions.
        chunks: Places of the block's chunks in the flattened `[B, P]`; `B * P` and more: none.
    """

    rows: Int[Tensor, "N R_t"]
    student_chunk_id: Int[Tensor, "N R"] | None = None
    teacher_chunk_id: Int[Tensor, "N R_t"] | None = None
    chunks: Int[Tensor, "N P"] | None = None


@dataclass(frozen=True)
class TokenBlocks:
    """A micro-batch's positions in N blocks of R student positions.

    Attributes:
        rows: Places of the student's positions in the flattened batch; `B * T_s` and more: none.
        teachers: Each teacher's side.
    """

    rows: Int[Tensor, "N R"]
    teachers: tuple[TeacherBlocks, ...]

    def to(self, device: torch.device | str) -> TokenBlocks:
        """The same blocks on another device, without waiting for it."""
        target = torch.device(device)

        def moved(x: Tensor) -> Tensor:
            pinned = x.pin_memory() if target.type == "cuda" and x.device.type == "cpu" else x
            return pinned.to(target, non_blocking=True)

        def side(t: TeacherBlocks) -> TeacherBlocks:
            columns = {field.name: getattr(t, field.name) for field in fields(t)}
            return replace(t, **{name: moved(x) for name, x in columns.items() if x is not None})

        return TokenBlocks(moved(self.rows), tuple(side(t) for t in self.teachers))


class Extent(NamedTuple):
    """A teacher as blocks see it: its chunks (None: the student's tokenizer) and its positions a sample."""

    chunks: ChunkView | None
    positions: int


def blocks_of_samples(
    shape: tuple[int, int], teachers: Sequence[Extent], rows: int, device: torch.device
) -> TokenBlocks:
    """Blocks of whole samples: nothing about the batch's values needs to be known.

    Args:
        shape: `(B, T_s)`.
        teachers: Their chunks and widths.
        rows: A block has as many samples as fit into so many student positions, and at least one.
        device: Where the batch is.
    """
    B, T = shape
    samples = max(1, min(B, rows // max(T, 1)))
    N = -(-B // samples)

    def places(width: int) -> Tensor:
        return torch.arange(N * samples * width, device=device).view(N, samples * width)

    def local(chunk_id: Tensor, chunks: int) -> Tensor:
        first = torch.arange(B, device=device).unsqueeze(1) % samples * chunks
        inside = (chunk_id >= 0) & (chunk_id < chunks)
        ids = torch.where(inside, chunk_id + first, -1)
        missing = ids.new_full((N * samples - B, ids.shape[1]), -1)
        return torch.cat([ids, missing]).view(N, -1)

    sides = []
    for view, width in teachers:
        if view is None:
            sides.append(TeacherBlocks(places(T)))
            continue
        P = view.max_chunks
        ids = local(view.student_chunk_id, P), local(view.teacher_chunk_id, P)
        sides.append(TeacherBlocks(places(width), *ids, places(P)))
    return TokenBlocks(places(T), tuple(sides))


def packed_blocks(needed: Bool[Tensor, "B T_s"], teachers: Sequence[Extent], rows: int) -> TokenBlocks:
    """Blocks of those positions alone that some loss looks at, as evenly filled as chunks allow.

    Runs of positions that share a chunk with each other stay together, the others fill what is left.

    Args:
        needed: Positions whose next token counts; those of a comparable chunk are added. On the CPU.
        teachers: Their chunks and widths.
        rows: Most student positions of a block; a longer run of joined positions gets a longer block.
    """
    B, T = needed.shape
    sides = [None if view is None else _Chunks.of(view) for view, _ in teachers]
    counted = needed.flatten()
    joined = torch.zeros(B * T + 2, dtype=torch.int64)
    for side in sides:
        if side is not None:
            counted = counted | (side.student >= 0)
            ones = torch.ones_like(side.live)
            joined = joined.index_add(0, side.first[side.live] + 1, ones).index_add(0, side.last[side.live] + 1, -ones)
    run = (joined.cumsum(0)[: B * T] == 0).long().cumsum(0) - 1
    sizes = torch.zeros(B * T, dtype=torch.int64).index_add(0, run, counted.long())
    total, longest = int(sizes.sum()), int(sizes.max()) if B * T else 0
    R = max(min(rows, _rounded(-(-total // max(1, -(-total // rows))))), longest, 1)
    block = _block_of_runs(sizes, R)[run]
    places = torch.nonzero(counted).squeeze(1)
    N = int(block[places].max()) + 1 if total else 1
    table, rank = _grouped(places, block[places], (N, R), B * T)
    own = _OwnRows(places, block, rank, table)
    return TokenBlocks(
        table,
        tuple(TeacherBlocks(table) if side is None else side.blocks(own) for side in sides),
    )


class _OwnRows(NamedTuple):
    """The student's positions: their places, the block of every place, each position's rank in its block."""

    places: Tensor
    block: Tensor
    rank: Tensor
    table: Tensor


class _Chunks(NamedTuple):
    """A teacher's comparable chunks, numbered through the batch: whose each position is, where each begins and ends."""

    student: Tensor
    teacher: Tensor
    live: Tensor
    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, view: ChunkView) -> _Chunks:
        B, P = view.comparable.shape
        comparable = torch.cat([view.comparable.flatten(), torch.zeros(1, dtype=torch.bool)])

        def numbered(ids: Tensor) -> Tensor:
            chunk = torch.where((ids >= 0) & (ids < P), ids + torch.arange(B).unsqueeze(1) * P, -1).flatten()
            return torch.where(comparable[chunk], chunk, -1)

        student, teacher = numbered(view.student_chunk_id), numbered(view.teacher_chunk_id)
        places = torch.nonzero(student >= 0).squeeze(1)
        none = torch.zeros(B * P, dtype=torch.int64)
        first = none.scatter_reduce(0, student[places], places, "amin", include_self=False)
        last = none.scatter_reduce(0, student[places], places, "amax", include_self=False)
        return cls(student, teacher, torch.nonzero(comparable).squeeze(1), first, last)

    def blocks(self, own: _OwnRows) -> TeacherBlocks:
        """This teacher's side of blocks."""
        N, R = own.table.shape
        nobody = self.first.shape[0]
        of_chunk = own.block[self.first[self.live]]
        chunks, rank = _grouped(self.live, of_chunk, (N, _most(of_chunk)), nobody)
        local, block = torch.full((nobody + 1,), -1), torch.zeros(nobody, dtype=torch.int64)
        local[self.live], block[self.live] = rank, of_chunk
        student = torch.full((N, R), -1)
        student[own.block[own.places], own.rank] = local[self.student[own.places]]
        places = torch.nonzero(self.teacher >= 0).squeeze(1)
        of_place = block[self.teacher[places]]
        shape = (N, _most(of_place))
        rows, rank = _grouped(places, of_place, shape, self.teacher.shape[0])
        teacher = torch.full(shape, -1)
        teacher[of_place, rank] = local[self.teacher[places]]
        return TeacherBlocks(rows, student, teacher, chunks)


def _block_of_runs(sizes: Tensor, capacity: int) -> Tensor:
    """The block of each run: long runs in order and spread evenly, runs of one position where there is room."""
    block = torch.zeros_like(sizes)
    runs = torch.nonzero(sizes > 1).squeeze(1)
    ends = sizes[runs].cumsum(0)
    used: list[int] = []
    if len(runs):
        N = -(-int(sizes.sum()) // capacity)
        budget = min(capacity, -(-int(ends[-1]) // N) + int(sizes.max()))
        start = before = 0
        while start < len(runs):
            stop = int(torch.searchsorted(ends, before + budget, right=True))
            block[runs[start:stop]] = len(used)
            used.append(int(ends[stop - 1]) - before)
            start, before = stop, int(ends[stop - 1])
    singles = torch.nonzero(sizes == 1).squeeze(1)
    room = [capacity - taken for taken in used]
    while sum(room) < len(singles):
        room.append(capacity)
    if len(singles):
        block[singles] = torch.searchsorted(torch.tensor(room).cumsum(0), torch.arange(len(singles)), right=True)
    return block


def _grouped(places: Tensor, group: Tensor, shape: tuple[int, int], nobody: int) -> tuple[Tensor, Tensor]:
    """`[N, width]` places by group, in order, the rest `nobody`; and each place's rank within its group."""
    order = group.argsort(stable=True)
    first = torch.searchsorted(group[order], torch.arange(shape[0]))
    rank = torch.empty_like(places)
    rank[order] = torch.arange(len(places)) - first[group[order]]
    table = torch.full(shape, nobody)
    table[group, rank] = places
    return table, rank


def _most(group: Tensor) -> int:
    """The size of the largest group, rounded up."""
    return _rounded(int(torch.bincount(group).max()) if len(group) else 1)


def _rounded(n: int) -> int:
    return -(-n // ROUNDING) * ROUNDING
