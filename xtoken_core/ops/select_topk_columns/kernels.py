"""The Triton kernels of `select_topk_columns`."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit(do_not_specialize=["R", "T"])
def column_maxima_kernel(
    logits_ptr, partial_ptr, R, T, V, stride_b, stride_t, PER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Compute maxima of COLUMNS columns over PER rows, NaN largest. Row r is position r % T of sample r // T."""
    first = tl.program_id(0).to(tl.int64) * PER
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    best = tl.full((ROWS, COLUMNS), float("-inf"), dtype=tl.float32)
    for start in range(0, PER, ROWS):
        rows = first + start + tl.arange(0, ROWS)
        bases = logits_ptr + rows // T * stride_b + rows % T * stride_t
        inside = (rows < R)[:, None] & (columns < V)[None, :]
        x = tl.load(bases[:, None] + columns[None, :], mask=inside, other=float("-inf")).to(tl.float32)
        best = tl.where((x > best) | (x != x), x, best)
    nan = tl.max((best != best).to(tl.int32), axis=0) > 0
    highest = tl.where(nan, float("nan"), tl.max(best, axis=0))
    tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * V + columns, highest, mask=columns < V)


@triton.jit
def above_border_kernel(keys_ptr, border_ptr, packed_ptr, V, BLOCK: tl.constexpr):
    """Store 1 << 32 where a key is above the border, 1 where it is equal: running sums count both."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key, border = tl.load(keys_ptr + i, mask=i < V, other=0), tl.load(border_ptr)
    packed = ((key > border).to(tl.int64) << 32) + (key == border).to(tl.int64)
    tl.store(packed_ptr + i, packed, mask=i < V)


@triton.jit(do_not_specialize=["k"])
def chosen_columns_kernel(keys_ptr, border_ptr, counted_ptr, columns_ptr, V, k, BLOCK: tl.constexpr):
    """Store each selected id at its rank: ids above the threshold; ties by lowest index."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key, border = tl.load(keys_ptr + i, mask=i < V, other=0), tl.load(border_ptr)
    counted = tl.load(counted_ptr + i, mask=i < V, other=0)
    above, equal = counted >> 32, counted & 0xFFFFFFFF
    wanted = k - (tl.load(counted_ptr + V - 1) >> 32)
    chosen = (i < V) & ((key > border) | ((key == border) & (equal <= wanted)))
    tl.store(columns_ptr + above + tl.minimum(equal, wanted) - 1, i.to(tl.int64), mask=chosen)
