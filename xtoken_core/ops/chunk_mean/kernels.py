"""The Triton kernels of `chunk_mean`."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit(do_not_specialize=["T"])
def chunk_mean_kernel(
    x_ptr, order_ptr, first_ptr, means_ptr, sizes_ptr, T, V, stride_b, stride_t, eps, BLOCK: tl.constexpr
):
    """Compute BLOCK columns of one chunk's sum over its positions, in their order, divided by (their number + eps)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, stop = tl.load(first_ptr + row), tl.load(first_ptr + row + 1)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    # One after the other: a chunk's sum does not depend on what else is in the batch.
    for i in range(start, stop):
        position = tl.load(order_ptr + i)
        base = x_ptr + position // T * stride_b + position % T * stride_t
        total += tl.load(base + columns, mask=columns < V, other=0.0).to(tl.float32)
    size = (stop - start).to(tl.float32)
    tl.store(means_ptr + row * V + columns, (total / (size + eps)).to(means_ptr.dtype.element_ty), mask=columns < V)
    if tl.program_id(1) == 0:
        tl.store(sizes_ptr + row, size)


@triton.jit
def chunk_mean_bwd_kernel(grad_ptr, chunk_ptr, first_ptr, out_ptr, V, eps, BLOCK: tl.constexpr):
    """Compute BLOCK columns of one position's gradient: its chunk's over (chunk size + eps); 0 without a chunk."""
    position = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(chunk_ptr + position)
    own = tl.maximum(row, 0)
    size = (tl.load(first_ptr + own + 1) - tl.load(first_ptr + own)).to(tl.float32)
    wanted = tl.where(row >= 0, V, 0)  # no column of a position without a chunk is read
    grad = tl.load(grad_ptr + own * V + columns, mask=columns < wanted, other=0.0).to(tl.float32)
    tl.store(out_ptr + position * V + columns, (grad / (size + eps)).to(out_ptr.dtype.element_ty), mask=columns < V)
