"""The Triton kernels of `sparse_projection`, over columns: an entry of the matrix moves a whole line of rows."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def sparse_projection_kernel(lines_ptr, offsets_ptr, sources_ptr, weights_ptr, out_ptr, N, BLOCK: tl.constexpr):
    """Compute BLOCK rows of `x W` at one teacher id: its student ids' lines, weighted and added in id order."""
    teacher = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    # No atomic: a program owns its teacher id and goes through that column's entries.
    for entry in range(tl.load(offsets_ptr + teacher), tl.load(offsets_ptr + teacher + 1)):
        line = lines_ptr + tl.load(sources_ptr + entry).to(tl.int64) * N
        total += tl.load(weights_ptr + entry) * tl.load(line + rows, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + teacher * N + rows, total.to(out_ptr.dtype.element_ty), mask=rows < N)


@triton.jit
def sparse_projection_bwd_kernel(lines_ptr, targets_ptr, weights_ptr, out_ptr, N, V_s, slots, BLOCK: tl.constexpr):
    """Compute BLOCK rows of `g W^T` at one student id: its teacher ids' lines, weighted and added in id order."""
    student = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in range(slots):
        target = tl.load(targets_ptr + slot * V_s + student).to(tl.int64)
        line = lines_ptr + tl.maximum(target, 0) * N
        wanted = tl.where(target >= 0, N, 0)  # an empty slot reads nothing
        value = tl.load(line + rows, mask=rows < wanted, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + slot * V_s + student) * value
    tl.store(out_ptr + student * N + rows, total.to(out_ptr.dtype.element_ty), mask=rows < N)
