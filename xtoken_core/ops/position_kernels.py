"""The Triton kernel that sorts a batch's positions by chunk."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def rows_of(chunk_id_ptr, i, T, P, N, C):
    """Return the chunk rows of positions, int32: C for those of no chunk, more beyond the batch."""
    chunk = tl.load(chunk_id_ptr + i, mask=i < N, other=-1)
    inside = (chunk >= 0) & (chunk < P)
    return tl.where(i < N, tl.where(inside, i // T * P + chunk.to(tl.int32), C), 2147483647)


@triton.jit(do_not_specialize=["T", "P", "N", "C"], do_not_specialize_on_alignment=["chunk_id_ptr"])
def chunk_positions_kernel(
    chunk_id_ptr, chunk_ptr, order_ptr, first_ptr, T, P, N, C, ENTRIES: tl.constexpr, BLOCK: tl.constexpr
):
    """Compare ENTRIES entries with all N positions: first come the positions, then the C rows and their end.

    A position's place is the number of those that come before it; a row begins behind all positions of earlier rows.
    """
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    placed = entry < N
    row = tl.where(placed, rows_of(chunk_id_ptr, entry, T, P, N, C), entry - N)
    before = tl.where(placed, entry, -1)
    # [ENTRIES, BLOCK] comparisons at once; rows of chunks come before all their positions (`before` is -1).
    count = tl.zeros((ENTRIES,), dtype=tl.int32)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        other = rows_of(chunk_id_ptr, i, T, P, N, C)[None, :]
        earlier = (other < row[:, None]) | ((other == row[:, None]) & (i[None, :] < before[:, None]))
        count += tl.sum(earlier.to(tl.int32), axis=1)
    tl.store(chunk_ptr + entry, tl.where(row < C, row, -1).to(tl.int64), mask=placed)
    tl.store(order_ptr + count, entry.to(tl.int64), mask=placed)
    tl.store(first_ptr + entry - N, count.to(tl.int64), mask=(entry >= N) & (entry - N <= C))
