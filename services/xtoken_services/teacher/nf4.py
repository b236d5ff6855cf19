"""Linear layers in NormalFloat 4, by bitsandbytes, which is an extra."""

from __future__ import annotations

import bitsandbytes.functional  # type: ignore[import-not-found,unused-ignore]  # an extra
from bitsandbytes import matmul_4bit  # type: ignore[import-not-found,unused-ignore]  # an extra
from jaxtyping import Float
from torch import Tensor

from xtoken_services.teacher.quantized import QuantizedLinear

BLOCK = 64
"""Neighbouring weights of a row that have one scale."""


class Nf4Linear(QuantizedLinear):
    """`x W^T + b` with `W` in NormalFloat 4, one float32 scale per block: 4.5 bits a weight.

    The 16 values are quantiles of the normal distribution (Dettmers et al. 2023, arXiv 2305.14314). Weights are decoded
    to the dtype of `x` for the product.
    """

    MULTIPLES = (1, BLOCK)
    """A block is within a row: the kernels for few tokens need that."""

    def quantize(self, weight: Float[Tensor, "N K"]) -> None:
        """Store a weight's packed values and its blocks' scales."""
        packed, self.state = bitsandbytes.functional.quantize_4bit(
            weight.contiguous(), blocksize=BLOCK, quant_type="nf4"
        )
        self.register_buffer("weight", packed)
        self.register_buffer("scale", self.state.absmax)

    def product(self, x: Float[Tensor, "M K"]) -> Float[Tensor, "M N"]:
        """Return `x W^T` in the dtype of `x`."""
        out: Tensor = matmul_4bit(x, self.weight.t(), quant_state=self.state)
        return out
