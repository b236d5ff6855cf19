"""Scaling by a number on the device, which costs nothing where it is 1."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from xtoken_core.ops.registry import device_kind


def scale_(x: Float[Tensor, "*shape"], factor: Float[Tensor, ""]) -> Float[Tensor, "*shape"]:
    """Multiply in place and return the result; on a CUDA GPU nothing is read or written if the factor is 1.

    Args:
        x: Contiguous.
        factor: In float32, float64 for float64.
    """
    if device_kind(x.device) != "cuda":
        return x.mul_(factor)
    from xtoken_core.ops.scaling_kernels import scale  # Triton is there with CUDA alone

    return scale(x, factor)
