"""The Triton kernel of `select_topk_columns`."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def column_maxima_kernel(
    logits_ptr, partial_ptr, R, T, V, stride_b, stride_t, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Maxima of COLUMNS columns over ROWS rows; NaN counts as the largest. Row r is position r % T of sample r // T."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < V
    best = tl.full((COLUMNS,), float("-inf"), dtype=tl.float32)
    for i in range(tl.minimum(R - first, ROWS)):
        row = first + i
        place = row // T * stride_b + row % T * stride_t
        x = tl.load(logits_ptr + place + columns, mask=mask, other=float("-inf")).to(tl.float32)
        best = tl.where((x > best) | (x != x), x, best)
    tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * V + columns, best, mask=mask)
