"""Helpers of the Triton backends: launch conditions and sizes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from xtoken_core.errors import ConfigError

# More than one, so that tests in the interpreter see programs share the work; few, since it runs them in turn.
INTERPRETED_PROGRAMS = 3


def interpreting() -> bool:
    """Return True if kernels run in Triton's interpreter (`TRITON_INTERPRET=1`), on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def launching_on(x: Tensor) -> AbstractContextManager[None]:
    """Return a context in which kernels are launched on a tensor's own GPU.

    Raises:
        ConfigError: It is not on a GPU and the interpreter is off.
    """
    if x.is_cuda:
        return torch.cuda.device(x.device)
    if not interpreting():
        raise ConfigError(
            f"Triton kernels need a GPU, the tensors are on {x.device}: take OP=triton out of XTOKEN_OPS, "
            "or set TRITON_INTERPRET=1 to run them in the interpreter"
        )
    return nullcontext()


@cache
def processors(device: torch.device) -> int:
    """Return a GPU's number of multiprocessors, and few in the interpreter."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least `n`, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def row_parts(x: Tensor, block: int) -> tuple[int, int, int]:
    """Return how programs share a row that they hold in registers: their number, its power of two, and their columns.

    Args:
        x: `[..., V]`.
        block: Columns of a program, a power of two.
    """
    # The interpreter runs one program after the other: the first would wait for the second for ever.
    block = min(block, power_of_2(x.shape[-1])) if x.is_cuda else power_of_2(x.shape[-1])
    parts = -(-x.shape[-1] // block)
    return parts, power_of_2(parts), block


def rounded_up(n: int, multiple: int = 16) -> int:
    """Return the smallest multiple that is at least `n`."""
    return -(-n // multiple) * multiple


def row_strides(x: Tensor) -> tuple[int, int]:
    """Return the strides of sample and position.

    A single sample's is 0, whatever its length: kernels are compiled again for numbers that do not fit 32 bits.
    """
    return x.stride(0) if x.shape[0] > 1 else 0, x.stride(1)


def accumulates_in_float32(x: Tensor) -> bool:
    """Return True if the reference accumulates in float32 for this dtype, as the kernels do."""
    return x.dtype in (torch.float32, torch.bfloat16, torch.float16)
