"""The Triton kernel that copies a row's members of classes in the order of the classes, so that these are adjacent.

Reading single logits by class would move 32 bytes for each. A group of members is read in the order of their ids, in
which many lie in the same bytes, and is put in order in shared memory.
"""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from xtoken_core.ops.chain.start_kernels import row_of


@triton.jit(do_not_specialize=["from_event"])
def chain_member_kernel(
    logits_ptr, chunk_ptr, row_ptr, ascending_ptr, rank_ptr, members_ptr, from_event, groups, n, T, stride_b, stride_t,
    GROUP: tl.constexpr
):  # fmt: skip
    """Copy one group of the members of classes, at the start of one chunk."""
    slot, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    event = from_event + slot
    if tl.load(chunk_ptr + event) >= 0:
        base = row_of(logits_ptr, tl.load(row_ptr + event), T, stride_b, stride_t)
        i = group * GROUP + tl.arange(0, GROUP)
        x = tl.load(ascending_ptr + i, mask=i < n, other=0)
        z = tl.load(base + x, mask=i < n, other=0.0)
        rank = tl.load(rank_ptr + i, mask=i < n, other=0).to(tl.int32)
        tl.store(members_ptr + slot.to(tl.int64) * n + i, tl.gather(z, rank, 0), mask=i < n)
