"""The Triton kernel that scales a tensor, unless the factor is 1."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from xtoken_core.ops.triton_support import launching_on, processors

BLOCK, WARPS, PROGRAMS_PER_PROCESSOR = 4096, 8, 8


@triton.jit(do_not_specialize=["n"])
def scale_kernel(x_ptr, factor_ptr, n, BLOCK: tl.constexpr):
    """Multiply every number by the factor; 1 changes nothing and is returned from at once."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < n)
            tl.store(x_ptr + at, (x * factor).to(x_ptr.dtype.element_ty), mask=at < n)


def scale(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply a contiguous tensor in place and return it."""
    with launching_on(x):
        programs = min(triton.cdiv(x.numel(), BLOCK), processors(x.device) * PROGRAMS_PER_PROCESSOR)
        if programs:
            scale_kernel[(programs,)](x, factor, x.numel(), BLOCK, num_warps=WARPS)
    return x
