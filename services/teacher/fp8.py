"""Linear layers in 8 bits: weights scaled by output row, activations by token, products on the GPU's 8-bit units."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from xtoken_core.errors import ConfigError

LARGEST = 448.0
"""The largest finite value of `float8_e4m3fn`."""
MULTIPLE = 16
"""The kernels take matrices whose sides are multiples of this."""
OLDEST = (8, 9)
"""The compute capability of the first GPUs with 8-bit products."""


class Fp8Linear(nn.Module):
    """`x W^T + b` with `W` in `float8_e4m3fn`, one scale per row of `W` and one per token of `x`.

    Args:
        linear: The layer it stands for, on a GPU.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = row_scale(weight)
        self.register_buffer("weight", (weight / scale).to(torch.float8_e4m3fn))
        self.register_buffer("scale", scale.t().contiguous())
        self.bias = linear.bias

    def forward(self, x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows N"]:
        """The layer's output in the dtype of `x`, which is bfloat16."""
        flat = x.reshape(-1, x.shape[-1])
        scale = row_scale(flat)
        small = (flat.float() / scale).to(torch.float8_e4m3fn)
        out: Tensor = torch._scaled_mm(
            small, self.weight.t(), scale_a=scale, scale_b=self.scale, out_dtype=x.dtype, use_fast_accum=True
        )
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], -1)


def row_scale(x: Float[Tensor, "M K"]) -> Float[Tensor, "M 1"]:
    """What each row is divided by so that its largest value is the format's, in float32."""
    return x.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / LARGEST


def check_fp8(device: torch.device, dtype: str, what: str) -> None:
    """Refuse 8-bit weights where they cannot be multiplied.

    Raises:
        ConfigError: With the reason.
    """
    if device.type != "cuda":
        raise ConfigError(f"{what}: fp8 needs a GPU, and this teacher is on the {device.type.upper()}: set fp8 = false")
    found = torch.cuda.get_device_capability(device)
    if found < OLDEST:
        raise ConfigError(
            f"{what}: fp8 needs a GPU of compute capability {OLDEST[0]}.{OLDEST[1]} or newer, "
            f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}: set fp8 = false"
        )
    if dtype != "bfloat16":
        raise ConfigError(f'{what}: fp8 goes with dtype = "bfloat16", not {dtype!r}')


def swap_linears(body: nn.Module) -> int:
    """Replace the linear layers that the kernels can take, in place; returns how many."""
    count = 0
    for module in list(body.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and not (child.in_features % MULTIPLE or child.out_features % MULTIPLE):
                setattr(module, name, Fp8Linear(child))
                count += 1
    return count
