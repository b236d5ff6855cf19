"""A teacher's logits in 8 bits (e4m3): three forms, their kernels, and the same in PyTorch.

`row` has one scale per row, `group` one per 128 logits, both powers of 2, so that a value times its scale is exact in
bfloat16. `distance` has none: it holds a logit less the largest one of its row, which no softmax can tell from the
logit. The most probable tokens are then near 0, where the format is finest.
"""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from xtoken_core.ops.chain.start_kernels import ADJACENT, columns_of, exp, in_64_bits, raised, sum_over_lanes

FORMS = ("row", "group", "distance")
GROUP = 128
LARGEST = tl.constexpr(448.0)
"""The largest number of e4m3, `1.75 * 2**8`."""
MANTISSA, FRACTION = tl.constexpr(23), tl.constexpr(0x7FFFFF)
"""Bits of float32's mantissa: how many, and which."""
EIGHT, OF_LARGEST = tl.constexpr(8), tl.constexpr(0x600000)
"""Exponent and mantissa of `LARGEST`."""


def encoded(logits: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Return logits `[R, V]` in 8 bits, and their scales in bfloat16: `[R, 1]`, `[R, V / 128]`, or `[R, 0]`."""
    z = logits.float()
    R, V = z.shape
    if form == "distance":
        near = (z - z.amax(1, keepdim=True)).clamp(min=-LARGEST.value)
        return near.to(torch.float8_e4m3fn), logits.new_empty(R, 0)
    groups = z.view(R, 1 if form == "row" else V // GROUP, -1)
    largest = groups.abs().amax(2).clamp(min=1e-30)
    mantissa, bits = MANTISSA.value, largest.view(torch.int32)
    exponent = (bits >> mantissa) - EIGHT.value + ((bits & FRACTION.value) > OF_LARGEST.value).int()
    scale = (exponent << mantissa).view(torch.float32)
    return (groups / scale.unsqueeze(2)).view(R, V).to(torch.float8_e4m3fn), scale.bfloat16()


def decoded(values: Tensor, scale: Tensor) -> Tensor:
    """Return logits in bfloat16 from the two parts; those of `distance` are less by the largest of their row."""
    z = values.float()
    if scale.shape[1]:
        z = (z.view(len(z), scale.shape[1], -1) * scale.float().unsqueeze(2)).view(z.shape)
    return z.bfloat16()


@triton.jit
def scale_for(largest):
    """Return the power of 2 that brings the largest magnitude into the format."""
    bits = tl.maximum(largest, 1e-30).to(tl.int32, bitcast=True)
    exponent = (bits >> MANTISSA) - EIGHT + ((bits & FRACTION) > OF_LARGEST).to(tl.int32)
    return (exponent << MANTISSA).to(tl.float32, bitcast=True)


@triton.jit
def largest_of_row(base, V, SIGNED: tl.constexpr, LANES: tl.constexpr):
    """Return a row's largest logit, or its largest magnitude."""
    top = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    for begin in range(0, V, LANES * ADJACENT):
        x = columns_of(begin, LANES)
        z = tl.load(base + x, mask=x < V, other=float("-inf")).to(tl.float32)
        if not SIGNED:
            z = tl.where(x < V, tl.abs(z), 0.0)
        top = tl.maximum(top, tl.max(z, axis=1))
    return tl.max(top, axis=0)


@triton.jit
def encode_kernel(logits_ptr, values_ptr, scale_ptr, V, FORM: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr):
    """Write one row in 8 bits; the forms that need its largest logit first read it twice, the second time from L2."""
    N: tl.constexpr = LANES * ADJACENT
    row = tl.program_id(0)
    base = logits_ptr + in_64_bits(row) * V
    to_ptr = values_ptr + in_64_bits(row) * V
    largest = 0.0
    if FORM != "group":
        largest = largest_of_row(base, V, FORM == "distance", LANES)
    if FORM == "row":
        tl.store(scale_ptr + row, scale_for(largest).to(tl.bfloat16))
    for begin in range(0, V, N):
        x = begin + tl.arange(0, N // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        z = tl.load(base + x, mask=x < V, other=0.0).to(tl.float32)
        if FORM == "distance":
            z = tl.maximum(z - largest, -LARGEST)
        if FORM == "row":
            z = z / scale_for(largest)
        if FORM == "group":
            scale = scale_for(tl.max(tl.abs(z), axis=1))
            group = begin // GROUP + tl.arange(0, N // GROUP)
            tl.store(scale_ptr + in_64_bits(row) * (V // GROUP) + group, scale.to(tl.bfloat16), mask=group < V // GROUP)
            z = z / scale[:, None]
        tl.store(to_ptr + x, z.to(tl.float8e4nv), mask=x < V)


@triton.jit
def log_sum_kernel(values_ptr, scale_ptr, lse_ptr, V, FORM: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr):
    """Compute one row's `log sum exp` from any of the forms, or from bfloat16, as `chain_teacher_kernel` does."""
    row = tl.program_id(0)
    base = values_ptr + in_64_bits(row) * V
    top = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((LANES,), dtype=tl.float32)
    of_row = 1.0
    if FORM == "row":
        of_row = tl.load(scale_ptr + row).to(tl.float32)
    for begin in range(0, V, LANES * ADJACENT):
        x = columns_of(begin, LANES)
        z = tl.load(base + x, mask=x < V, other=0.0).to(tl.float32)
        if FORM == "row":
            z = z * of_row
        if FORM == "group":
            first = begin + tl.arange(0, LANES) * ADJACENT
            at = scale_ptr + in_64_bits(row) * (V // GROUP) + first // GROUP
            z = z * tl.load(at, mask=first < V, other=0.0).to(tl.float32)[:, None]
        z = tl.where(x < V, z, float("-inf"))
        top, pivot, shrink = raised(top, z)
        total = total * shrink + tl.sum(exp(z - pivot[:, None]), axis=1)
    highest, whole = sum_over_lanes(top, total)
    tl.store(lse_ptr + row, tl.log(whole) + highest)
