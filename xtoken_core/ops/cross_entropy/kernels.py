"""The Triton kernel of `cross_entropy`'s backward; the forward's is shared."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit(do_not_specialize=["T"])
def cross_entropy_bwd_kernel(
    logits_ptr, targets_ptr, lse_ptr, upstream_ptr, grad_ptr, T, V, stride_b, stride_t, BLOCK: tl.constexpr
):
    """Compute `(softmax - onehot) * upstream` for one block of one row; a row without upstream gradient is not read."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < V
    upstream = tl.load(upstream_ptr + row)
    # Padding and masked positions: zeros, and the row is not read.
    if upstream == 0.0:
        tl.store(grad_ptr + row * V + columns, tl.zeros((BLOCK,), dtype=grad_ptr.dtype.element_ty), mask=mask)
    else:
        base = logits_ptr + row // T * stride_b + row % T * stride_t
        x = tl.load(base + columns, mask=mask, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - tl.load(lse_ptr + row)) - (columns == tl.load(targets_ptr + row)).to(tl.float32)
        tl.store(grad_ptr + row * V + columns, (gradient * upstream).to(grad_ptr.dtype.element_ty), mask=mask)
