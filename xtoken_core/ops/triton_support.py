"""What the Triton backends share: whether their kernels can run on a tensor, and launch sizes."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from xtoken_core.errors import ConfigError


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter (`TRITON_INTERPRET=1`), on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def require_runnable(x: Tensor) -> None:
    """Refuse a tensor that the kernels cannot read.

    Raises:
        ConfigError: It is not on a GPU and the interpreter is off.
    """
    if not (x.is_cuda or interpreting()):
        raise ConfigError(
            f"Triton kernels need a GPU, the tensors are on {x.device}: set XTOKEN_OPS to reference, "
            "or TRITON_INTERPRET=1 to run them in the interpreter"
        )


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def accumulates_in_float32(x: Tensor) -> bool:
    """Whether the kernels' float32 arithmetic is what the reference does for this dtype."""
    return x.dtype in (torch.float32, torch.bfloat16, torch.float16)
