"""Linear layers with quantized weights, whole or divided among processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class QuantizedLinear(nn.Module):
    """`x W^T + b` with a quantized `W`; a format's class stores the weight and multiplies by it.

    Of a layer that is divided among processes it is this process's part, quantized by itself. Rows of `W` are a part of
    the result; of columns all processes' results are summed.

    Args:
        linear: Layer to replace, on its device.

    Attributes:
        MULTIPLES: Rows and columns of a weight must be multiples of these.
    """

    MULTIPLES = (1, 1)
    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.group = _summing_group(linear.weight)
        self.bias = linear.bias if linear.bias is None else nn.Parameter(local_part(linear.bias.detach()))
        self.quantize(local_part(linear.weight.detach()))

    def quantize(self, weight: Float[Tensor, "N K"]) -> None:
        """Store a weight in the class's format, as buffers."""
        raise NotImplementedError

    def product(self, x: Float[Tensor, "M K"]) -> Float[Tensor, "M N"]:
        """Return `x W^T` in the dtype of `x`."""
        raise NotImplementedError

    def forward(self, x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows N"]:
        """Return `x W^T + b` in the dtype of `x`."""
        out = self.product(x.reshape(-1, x.shape[-1]))
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


def swap_linears(body: nn.Module, kind: type[QuantizedLinear], device: torch.device | None = None) -> int:
    """Replace the linear layers whose sides fit a format, in place; returns their number.

    Args:
        body: A model without its head.
        kind: Class of the format.
        device: Device to which each layer is moved before; None: the layers are on theirs.
    """
    count = 0
    for module in list(body.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and _fits(child, kind):
                setattr(module, name, kind(child if device is None else child.to(device)))
                count += 1
    return count


def _fits(linear: nn.Linear, kind: type[QuantizedLinear]) -> bool:
    sides = local_part(linear.weight).shape
    return not any(side % multiple for side, multiple in zip(sides, kind.MULTIPLES, strict=True))
