"""Blocks of positions for which a head is multiplied at once; no chunk is split between two blocks.

Indices are int64 into the flattened batch: position `t` of sample `b` is `b * T + t`, chunk `p` is `b * P + p`. Tables
are padded with the index one past the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from xtoken_core.losses.common import ChunkView

BLOCK_ROWS = 2048
"""Default number of student positions in a block."""
ROUNDING = 128
"""Block sizes are a multiple of this: a whole number of tiles of a matrix product."""


@dataclass(frozen=True)
class TeacherBlocks:
    """One teacher's side of N blocks. A teacher with the student's tokenizer has `rows` only.

    Attributes:
        rows: int64 indices of its positions in the flattened batch; `B * T_t` and more: padding.
        student_chunk_id: int64 chunk, numbered within the block, of each student position; -1 = none.
        teacher_chunk_id: Likewise of each teacher position.
        chunks: int64 indices of the block's chunks in the flattened `[B, P]`; `B * P` and more: padding.
    """

    rows: Int[Tensor, "N R_t"]
    student_chunk_id: Int[Tensor, "N R"] | None = None
    teacher_chunk_id: Int[Tensor, "N R_t"] | None = None
    chunks: Int[Tensor, "N P"] | None = None


@dataclass(frozen=True)
class TokenBlocks:
    """A micro-batch's positions in N blocks of R student positions.

    Attributes:
        rows: int64 indices of the student's positions in the flattened batch; `B * T_s` and more: padding.
        teachers: Each teacher's side.
    """

    rows: Int[Tensor, "N R"]
    teachers: tuple[TeacherBlocks, ...]

    def to(self, device: torch.device | str) -> TokenBlocks:
        """Copy the blocks to another device without waiting for it."""
        target = torch.device(device)

        def moved(x: Tensor) -> Tensor:
            # Only a copy from pinned memory is asynchronous.
            pinned = x.pin_memory() if target.type == "cuda" and x.device.type == "cpu" else x
            return pinned.to(target, non_blocking=True)

        def side(t: TeacherBlocks) -> TeacherBlocks:
            columns = {field.name: getattr(t, field.name) for field in fields(t)}
            return replace(t, **{name: moved(x) for name, x in columns.items() if x is not None})

        return TokenBlocks(moved(self.rows), tuple(side(t) for t in self.teachers))


class Extent(NamedTuple):
    """A teacher's chunks (None: the student's tokenizer) and its number of positions per sample, `T_t`."""

    chunks: ChunkView | None
    positions: int


def blocks_of_samples(
    shape: tuple[int, int], teachers: Sequence[Extent], rows: int, device: torch.device
) -> TokenBlocks:
    """Cut the batch into blocks of whole samples, from its shape alone and so without waiting for the device.

    Args:
        shape: `(B, T_s)`.
        teachers: Their chunks and widths.
        rows: Student positions of a block, rounded down to whole samples, at least one.
        device: Device of the batch.
    """
    B, T = shape
    # At least one: a sample longer than `rows` makes a longer block, since it cannot be split.
    samples = max(1, min(B, rows // max(T, 1)))  # per block
    N = -(-B // samples)

    def indices(width: int) -> Tensor:
        # The last block may reach past the batch: those indices are its padding.
        return torch.arange(N * samples * width, device=device).view(N, samples * width)

    def local(chunk_id: Tensor, chunks: int) -> Tensor:
        # Chunk p of the block's i-th sample gets number i * P + p; [B, T] -> [N, samples * T].
        first = torch.arange(B, device=device).unsqueeze(1) % samples * chunks
        inside = (chunk_id >= 0) & (chunk_id < chunks)
        ids = torch.where(inside, chunk_id + first, -1)
        # The last block's missing samples: positions without a chunk.
        missing = ids.new_full((N * samples - B, ids.shape[1]), -1)
        return torch.cat([ids, missing]).view(N, -1)

    sides = []
    for view, width in teachers:
        if view is None:
            sides.append(TeacherBlocks(indices(T)))
            continue
        P = view.max_chunks
        ids = local(view.student_chunk_id, P), local(view.teacher_chunk_id, P)
        sides.append(TeacherBlocks(indices(width), *ids, indices(P)))
    return TokenBlocks(indices(T), tuple(sides))


class PackedExtent(NamedTuple):
    """A teacher's side of a packed batch.

    Attributes:
        chunks: Its chunks; None: the student's tokenizer.
        tokens: Index of each token's sample.
        pairs: Index of each chunk's sample; None without chunks.
    """

    chunks: ChunkView | None
    tokens: Int[Tensor, "one T_t"]
    pairs: Int[Tensor, "one P"] | None


def blocks_of_packed_samples(
    sample: Int[Tensor, "one T_s"], teachers: Sequence[PackedExtent], rows: int
) -> TokenBlocks:
    """Cut a packed batch into blocks of whole samples, in order.

    Args:
        sample: Index of each student token's sample. On the CPU.
        teachers: Their sides.
        rows: Maximum of student positions per block; a longer sample gets a longer block.
    """
    # Next fit, in the order of the row and on the host: a packed row has few samples.
    block_of: list[int] = []
    block = used = 0
    for size in torch.bincount(sample.flatten()).tolist():
        if used and used + size > rows:
            block, used = block + 1, 0
        used += size
        block_of.append(block)
    blocks = torch.tensor(block_of)

    def table(samples: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the indices by block, and block and column of each."""
        own = blocks[samples.flatten()]
        indices = torch.arange(len(own))
        made, column = _grouped(indices, own, (block + 1, _largest_group(own)), padding=len(own))
        return made, own, column

    def numbered(ids: Tensor, local: Tensor, place: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Return the chunk of every position of the blocks, numbered within its block."""
        # `local` is by chunk of the whole row, `result` by position of a block: gather, then scatter.
        made, own, column = place
        # `local` has one entry more than the row has chunks.
        inside = (ids >= 0) & (ids < len(local) - 1)
        result = torch.full(made.shape, -1)
        result[own, column] = local[torch.where(inside, ids, -1).flatten()]
        return result

    student, sides = table(sample), []
    for view, tokens, pairs in teachers:
        if view is None or pairs is None:
            sides.append(TeacherBlocks(student[0]))
            continue
        teacher, (chunks, _, number) = table(tokens), table(pairs)
        local = torch.cat([number, torch.tensor([-1])])  # the index -1 reads the last entry
        ids = numbered(view.student_chunk_id, local, student), numbered(view.teacher_chunk_id, local, teacher)
        sides.append(TeacherBlocks(teacher[0], *ids, chunks))
    return TokenBlocks(student[0], tuple(sides))


def packed_blocks(needed: Bool[Tensor, "B T_s"], teachers: Sequence[Extent], rows: int) -> TokenBlocks:
    """Pack the positions that some loss reads into blocks, as evenly filled as chunks allow.

    Positions that share a chunk, of any teacher, stay in one block; single positions fill the remaining room.

    Args:
        needed: True for positions whose next token counts; those of a comparable chunk are added. On the CPU.
        teachers: Their chunks and widths.
        rows: Maximum of student positions per block; a longer run of joined positions gets a longer block.
    """
    B, T = needed.shape
    sides = [None if view is None else _Chunks.of(view) for view, _ in teachers]
    counted = needed.flatten()  # [B * T]
    # Chunks are intervals of positions, and chunks of several teachers may overlap. A difference array marks each
    # interval (first, last] by +1 at first + 1 and -1 at last + 1; its running sum at t is the number of chunks in
    # which t continues the position before it. Where that is 0 a new run begins, and a cut there splits no chunk.
    joined = torch.zeros(B * T + 2, dtype=torch.int64)
    for side in sides:
        if side is not None:
            counted = counted | (side.student >= 0)
            ones = torch.ones_like(side.live)
            joined = joined.index_add(0, side.first[side.live] + 1, ones).index_add(0, side.last[side.live] + 1, -ones)
    # [B * T]: 0 at the first position of every run, so that counting zeros numbers the runs.
    run = (joined.cumsum(0)[: B * T] == 0).long().cumsum(0) - 1  # [B * T] number of the run of each position
    sizes = torch.zeros(B * T, dtype=torch.int64).index_add(0, run, counted.long())  # counted positions of each run
    total, longest = int(sizes.sum()), int(sizes.max()) if B * T else 0
    # As many blocks as `rows` asks for, but of equal size: a last block of a few rows would be padded like the others.
    # `longest` wins over `rows`: a run that must not be split decides the size of all blocks.
    R = max(min(rows, _rounded(-(-total // max(1, -(-total // rows))))), longest, 1)
    block = _block_of_runs(sizes, R)[run]  # [B * T]
    indices = torch.nonzero(counted).squeeze(1)
    # On the host: the number of blocks decides shapes, and this runs where the batch is on the CPU.
    N = int(block[indices].max()) + 1 if total else 1
    table, rank = _grouped(indices, block[indices], (N, R), padding=B * T)
    own = _StudentRows(indices, block, rank, table)
    return TokenBlocks(table, tuple(TeacherBlocks(table) if side is None else side.blocks(own) for side in sides))


class _StudentRows(NamedTuple):
    """The student's counted positions, in order.

    Attributes:
        indices: `[n]` their indices.
        block: `[B * T_s]` block of every position.
        rank: `[n]` their ranks within their blocks.
        table: `[N, R]` the indices by block.
    """

    indices: Tensor
    block: Tensor
    rank: Tensor
    table: Tensor


class _Chunks(NamedTuple):
    """A teacher's comparable chunks, by their indices in the flattened `[B, P]`.

    Attributes:
        student: `[B * T_s]` chunk of each student position, -1 = none.
        teacher: `[B * T_t]` chunk of each teacher position, -1 = none.
        live: `[n]` indices of the comparable chunks, ascending.
        first: `[B * P]` first student position of each chunk; 0 for others.
        last: `[B * P]` last student position of each chunk; 0 for others.
    """

    student: Tensor
    teacher: Tensor
    live: Tensor
    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, view: ChunkView) -> _Chunks:
        B, P = view.comparable.shape
        # One entry more, False: the index -1 of a position without a chunk reads it.
        comparable = torch.cat([view.comparable.flatten(), torch.zeros(1, dtype=torch.bool)])

        def flat(ids: Tensor) -> Tensor:
            # [B * T] index of the chunk in the flattened [B, P], -1 = none.
            chunk = torch.where((ids >= 0) & (ids < P), ids + torch.arange(B).unsqueeze(1) * P, -1).flatten()
            return torch.where(comparable[chunk], chunk, -1)

        student, teacher = flat(view.student_chunk_id), flat(view.teacher_chunk_id)
        indices = torch.nonzero(student >= 0).squeeze(1)
        none = torch.zeros(B * P, dtype=torch.int64)
        # Without `include_self` the zeros that the result begins with would win every minimum.
        first = none.scatter_reduce(0, student[indices], indices, "amin", include_self=False)
        last = none.scatter_reduce(0, student[indices], indices, "amax", include_self=False)
        return cls(student, teacher, torch.nonzero(comparable).squeeze(1), first, last)

    def blocks(self, own: _StudentRows) -> TeacherBlocks:
        """Return this teacher's side of the student's blocks."""
        N, R = own.table.shape
        padding = self.first.shape[0]
        of_chunk = own.block[self.first[self.live]]  # a chunk is in the block of its first student position
        chunks, rank = _grouped(self.live, of_chunk, (N, _largest_group(of_chunk)), padding=padding)
        # [B * P + 1] number of each chunk within its block; the index -1 reads the last entry, -1.
        local, block = torch.full((padding + 1,), -1), torch.zeros(padding, dtype=torch.int64)
        local[self.live], block[self.live] = rank, of_chunk
        student = torch.full((N, R), -1)
        student[own.block[own.indices], own.rank] = local[self.student[own.indices]]
        # The teacher's positions follow their chunks; those of no comparable chunk are in no block.
        indices = torch.nonzero(self.teacher >= 0).squeeze(1)
        of_position = block[self.teacher[indices]]
        shape = (N, _largest_group(of_position))
        rows, rank = _grouped(indices, of_position, shape, padding=self.teacher.shape[0])
        teacher = torch.full(shape, -1)
        teacher[of_position, rank] = local[self.teacher[indices]]
        return TeacherBlocks(rows, student, teacher, chunks)


def _block_of_runs(sizes: Tensor, capacity: int) -> Tensor:
    """Return the block of each run: longer runs in order and evenly spread, single positions where there is room.

    Args:
        sizes: `[runs]` int64 counted positions of each run; 0: the run is in no block.
        capacity: Positions of a block, at least the longest run.
    """
    block = torch.zeros_like(sizes)
    runs = torch.nonzero(sizes > 1).squeeze(1)
    ends = sizes[runs].cumsum(0)
    used: list[int] = []
    if len(runs):
        N = -(-int(sizes.sum()) // capacity)
        # An equal part of the long runs per block, plus the one that may cross its border.
        budget = min(capacity, -(-int(ends[-1]) // N) + int(sizes.max()))
        start = before = 0
        while start < len(runs):
            # Bisection in the running sum finds the last run that fits: one step per block, not per run.
            stop = int(torch.searchsorted(ends, before + budget, right=True))
            block[runs[start:stop]] = len(used)
            used.append(int(ends[stop - 1]) - before)
            start, before = stop, int(ends[stop - 1])
    # Single positions split no chunk anywhere: they fill what the runs have left.
    singles = torch.nonzero(sizes == 1).squeeze(1)
    room = [capacity - taken for taken in used]
    while sum(room) < len(singles):
        room.append(capacity)
    if len(singles):
        # The i-th single position is in the first block at which the running sum of the room exceeds i.
        block[singles] = torch.searchsorted(torch.tensor(room).cumsum(0), torch.arange(len(singles)), right=True)
    return block


def _grouped(indices: Tensor, group: Tensor, shape: tuple[int, int], *, padding: int) -> tuple[Tensor, Tensor]:
    """Distribute indices over the rows of a table.

    Args:
        indices: `[n]` int64.
        group: `[n]` row of each.
        shape: `(N, width)`; no group is larger than `width`.
        padding: Value of unused entries.

    Returns:
        The table `[N, width]`, each row in the order of `indices`, and `[n]` the column of each index.
    """
    # Stable, so that each row of the table keeps the order of `indices`: sums then have the order of the text.
    order = group.argsort(stable=True)
    first = torch.searchsorted(group[order], torch.arange(shape[0]))  # [N] where each group begins in `order`
    rank = torch.empty_like(indices)
    rank[order] = torch.arange(len(indices)) - first[group[order]]
    table = torch.full(shape, padding)
    table[group, rank] = indices
    return table, rank


def _largest_group(group: Tensor) -> int:
    """Return the size of the largest group, rounded up to `ROUNDING`."""
    return _rounded(int(torch.bincount(group).max()) if len(group) else 1)


def _rounded(n: int) -> int:
    return -(-n // ROUNDING) * ROUNDING
