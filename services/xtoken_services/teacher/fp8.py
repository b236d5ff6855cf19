"""Linear layers in float8: weights scaled per output row, activations per token."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from xtoken_core.errors import ConfigError
from xtoken_services.teacher.quantized import QuantizedLinear

LARGEST = 448.0
"""The largest finite value of `float8_e4m3fn`."""
OLDEST = (8, 9)
"""Compute capability of the first GPUs with float8 matrix products."""


class Fp8Linear(QuantizedLinear):
    """`x W^T + b` with `W` in `float8_e4m3fn`, one scale per row of `W` and one per token of `x`, which is bfloat16.

    Of a layer that is divided by columns, rows and tokens have a scale per process.
    """

    MULTIPLES = (16, 16)
    """Sides of a matrix must be multiples of these for the float8 kernels."""

    def quantize(self, weight: Float[Tensor, "N K"]) -> None:
        """Store a weight, divided by its rows' scales, and the scales."""
        weight = weight.float()
        scale = row_scale(weight)
        self.register_buffer("weight", (weight / scale).to(torch.float8_e4m3fn))
        self.register_buffer("scale", scale.t().contiguous())

    def product(self, x: Float[Tensor, "M K"]) -> Float[Tensor, "M N"]:
        """Return `x W^T` in the dtype of `x`."""
        scale = row_scale(x)
        small = (x.float() / scale).to(torch.float8_e4m3fn)
        out: Tensor = torch._scaled_mm(
            small, self.weight.t(), scale_a=scale, scale_b=self.scale, out_dtype=x.dtype, use_fast_accum=True
        )
        return out


def row_scale(x: Float[Tensor, "M K"]) -> Float[Tensor, "M 1"]:
    """Return the float32 scale of each row: divided by it, the row's largest value is the format's largest."""
    return x.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / LARGEST


def check_fp8(device: torch.device, dtype: str, what: str) -> None:
    """Refuse float8 on a device or with a dtype that does not support it.

    Raises:
        ConfigError: It is not supported; the text says why.
    """
    if device.type != "cuda":
        raise ConfigError(f"{what}: fp8 needs a GPU, and this teacher is on the {device.type.upper()}: set fp8 = false")
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        raise ConfigError(
            f"{what}: fp8 needs a GPU of compute capability {OLDEST[0]}.{OLDEST[1]} or newer, "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}: set fp8 = false"
        )
    if dtype != "bfloat16":
        raise ConfigError(f'{what}: fp8 goes with dtype = "bfloat16", not {dtype!r}')
