"""Linear layers in float8: weights scaled per output row, activations per token."""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xtoken_core.errors import ConfigError

LARGEST = 448.0
"""The largest finite value of `float8_e4m3fn`."""
MULTIPLE = 16
"""Sides of a matrix must be multiples of this for the float8 kernels."""
OLDEST = (8, 9)
"""Compute capability of the first GPUs with float8 matrix products."""


class Fp8Linear(nn.Module):
    """`x W^T + b` with `W` in `float8_e4m3fn`, one scale per row of `W` and one per token of `x`.

    Of a layer that is divided among processes it is this process's part. Rows of `W` are a part of the result; of
    columns all processes' results are summed, and rows and tokens have a scale per process.

    Args:
        linear: Layer to replace, on a GPU.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.group = _summing_group(linear.weight)
        weight = local_part(linear.weight.detach()).float()
        scale = row_scale(weight)
        self.register_buffer("weight", (weight / scale).to(torch.float8_e4m3fn))
        self.register_buffer("scale", scale.t().contiguous())
        self.bias = linear.bias if linear.bias is None else nn.Parameter(local_part(linear.bias.detach()))

    def forward(self, x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows N"]:
        """Return `x W^T + b` in the dtype of `x`, which is bfloat16."""
        flat = x.reshape(-1, x.shape[-1])
        scale = row_scale(flat)
        small = (flat.float() / scale).to(torch.float8_e4m3fn)
        out: Tensor = torch._scaled_mm(
            small, self.weight.t(), scale_a=scale, scale_b=self.scale, out_dtype=x.dtype, use_fast_accum=True
        )
        if self.group is not None:
            dist.all_reduce(out, group=self.group)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], -1)


def local_part(weight: Tensor) -> Tensor:
    """Return the part of a weight that this process holds."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _summing_group(weight: Tensor) -> dist.ProcessGroup | None:
    """Return the processes whose results are summed, as each has some columns of a weight; None: nothing is summed."""
    if isinstance(weight, DTensor) and weight.placements[0].is_shard(1):
        return weight.device_mesh.get_group()
    return None


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


def swap_linears(body: nn.Module) -> int:
    """Replace the linear layers whose sides fit the kernels, in place; returns their number."""
    count = 0
    for module in list(body.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and not any(side % MULTIPLE for side in local_part(child.weight).shape):
                setattr(module, name, Fp8Linear(child))
                count += 1
    return count
