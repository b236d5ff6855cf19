"""The Triton kernels of `embedding`'s backward."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def embedding_bwd_pieces_kernel(
    grad_ptr,
    order_ptr,
    ids_ptr,
    starts_ptr,
    lengths_ptr,
    partial_ptr,
    out_ptr,
    H,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up to PIECE gradient rows of one id, in their order; short runs go to the table, others to scratch."""
    p = tl.program_id(0).to(tl.int64)
    start = tl.load(starts_ptr + p)
    length = tl.load(lengths_ptr + p)
    # A program per gradient row in the order of ids; only those at multiples of PIECE of a run work.
    rank = p - start
    if rank % PIECE == 0:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = columns < H
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for i in range(tl.minimum(length - rank, PIECE)):
            row = tl.load(order_ptr + p + i)
            total += tl.load(grad_ptr + row * H + columns, mask=mask, other=0.0).to(tl.float32)
        if length <= PIECE:
            row = tl.load(ids_ptr + p)
            tl.store(out_ptr + row * H + columns, total.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            # In PIECE rows one run can end and another begin: two slots.
            slot = p // PIECE * 2 + (rank == 0).to(tl.int64)
            tl.store(partial_ptr + slot * H + columns, total, mask=mask)


@triton.jit(do_not_specialize=["N"])
def embedding_bwd_runs_kernel(
    ids_ptr, starts_ptr, lengths_ptr, partial_ptr, out_ptr, N, H, PIECE: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the pieces of a long run in their order; a program looks for the run that starts in its PIECE positions."""
    block = tl.program_id(0).to(tl.int64) * PIECE
    offsets = block + tl.arange(0, PIECE)
    inside = offsets < N
    starts = tl.load(starts_ptr + offsets, mask=inside, other=-1)
    lengths = tl.load(lengths_ptr + offsets, mask=inside, other=0)
    p = tl.max(tl.where((starts == offsets) & (lengths > PIECE), offsets, -1), axis=0)
    if p >= 0:
        length = tl.load(lengths_ptr + p)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = columns < H
        # Pieces are added one after the other, so the sum's order is that of the rows.
        total = tl.load(partial_ptr + (p // PIECE * 2 + 1) * H + columns, mask=mask, other=0.0)
        for done in range(PIECE, length, PIECE):
            slot = (p + done) // PIECE * 2
            total += tl.load(partial_ptr + slot * H + columns, mask=mask, other=0.0)
        row = tl.load(ids_ptr + p)
        tl.store(out_ptr + row * H + columns, total.to(out_ptr.dtype.element_ty), mask=mask)
