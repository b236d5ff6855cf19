"""Whether a teacher and its ring fit the GPU, looked at before anything is loaded."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch
from safetensors import safe_open

from xtoken_core.errors import ConfigError
from xtoken_core.teacher.ring import RingShape
from xtoken_core.wire.columns import ITEM_SIZES

GIB = 1 << 30


def weight_bytes(directory: Path, dtype: str) -> int:
    """Bytes of a model's weights once they are loaded in a dtype."""
    values = 0
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            values += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no mapping
    return values * ITEM_SIZES[dtype]


def check_budget(device: torch.device, weights: int, shape: RingShape, what: str, *, ring_on_device: bool) -> None:
    """Refuse a teacher that cannot fit its GPU, whatever else runs there.

    Args:
        device: Where it will be; nothing is looked at on a CPU.
        weights: Bytes of its weights.
        shape: Of its ring.
        what: The teacher, for the error.
        ring_on_device: Whether the ring is on the GPU too.

    Raises:
        ConfigError: With what is needed and what is free.
    """
    if device.type != "cuda":
        return
    ring = shape.memory_bytes if ring_on_device else 0
    free, total = torch.cuda.mem_get_info(device)
    if weights + ring > free:
        raise ConfigError(
            f"{what} needs {(weights + ring) / GIB:.2f} GiB on {device} (weights {weights / GIB:.2f}, {shape.slots} "
            f"slots of its signal {ring / GIB:.2f}), {free / GIB:.2f} of {total / GIB:.2f} GiB are free: lower "
            'workers.slots or train.micro_batch_tokens, send hidden states (workers.signal = "cuda_ipc_hidden"), or '
            "give it another GPU"
        )
