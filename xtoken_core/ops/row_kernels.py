"""Triton code over rows of logits that several ops share."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

NAN = tl.constexpr(0x7FC00000)


@triton.jit
def ordered_bits(x):
    """Return integers in the order of float32 values: -0.0 equals 0.0, NaN is the largest."""
    # The sign bit is in front: of negative numbers the other bits are inverted, so that larger ones come later.
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, NAN, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
