"""The Triton kernels of `cross_entropy`: a row's values, with its gradient where the upstream gradient is known."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.row_kernels import first_of, hand_over, largest, over_parts


@triton.jit(do_not_specialize=["T"])
def cross_entropy_kernel(
    logits_ptr,
    targets_ptr,
    upstream_ptr,
    slots_ptr,
    lse_ptr,
    losses_ptr,
    hits_ptr,
    grad_ptr,
    T,
    V,
    stride_b,
    stride_t,
    GRADIENT: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one block of a row: its sums for the row's `log sum exp x`, loss and hit, and with GRADIENT its gradient.

    The block stays in registers while the row's programs exchange their sums, each in its slot, 0 before.
    """
    number = tl.program_id(0)
    row, part = (number // PARTS).to(tl.int64), number % PARTS
    columns = part * BLOCK + tl.arange(0, BLOCK)
    mask = columns < V
    base = logits_ptr + row // T * stride_b + row % T * stride_t
    x = tl.load(base + columns, mask=mask, other=float("-inf")).to(tl.float32)
    top = largest(x)
    target = tl.load(targets_ptr + row)
    holds = target // BLOCK == part
    own, first = 0.0, 0
    if holds:
        # This program alone overwrites it, later.
        own, first = tl.load(base + target).to(tl.float32), first_of(x, top, columns)
    e = tl.exp(x - top)
    hand_over(slots_ptr + number, top, tl.sum(e, axis=0))
    upstream, factor = tl.load(upstream_ptr + row) if GRADIENT else 0.0, 0.0
    # Others wait for nothing: padding and masked positions have zeros, whatever the row holds.
    if holds | (upstream != 0.0):
        lse, _, _, best = over_parts(slots_ptr + row * PARTS, PARTS, SLOTS)
        factor = tl.exp(top - lse)
        if holds:
            tl.store(lse_ptr + row, lse)
            tl.store(losses_ptr + row, lse - own)
            tl.store(hits_ptr + row, (best == part) & (first == target))  # the lowest id of a tie
    if GRADIENT:
        to_ptr = grad_ptr + row * V
        gradient = tl.where(upstream != 0.0, e * (factor * upstream), 0.0)
        tl.store(to_ptr + columns, gradient.to(to_ptr.dtype.element_ty), mask=mask)
        if holds & (upstream != 0.0):
            tl.debug_barrier()  # another thread has stored this column
            of_target = (tl.exp(own - top) * factor - 1.0) * upstream
            tl.store(to_ptr + target, of_target.to(to_ptr.dtype.element_ty))


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
