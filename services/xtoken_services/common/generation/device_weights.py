"""The student's weights in device memory, which rollout workers open by CUDA IPC: no byte passes the host.

The memory is written in place. A reader compares the header of the published file before and after its copy, and the
trainer marks the header before it writes, so that a mixture of two versions is read again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from xtoken_core.errors import InputError, first_line
from xtoken_core.transports.cuda_memory import CudaError, DeviceMemory, bindings_installed, device_of, device_uuid
from xtoken_core.transports.ring import SignalError

ALIGNMENT = 256
"""Bytes between whose multiples tensors begin."""
NO_MEMORY = "cudaErrorMemoryAllocation"


class DeviceWeights:
    """The trainer's copy of its weights.

    Args:
        model: The student, on a GPU.

    Raises:
        CudaError: There is no room for it, or its memory cannot be shared.
    """

    def __init__(self, model: nn.Module) -> None:
        weights = dict(model.named_parameters())
        self.device = next(iter(weights.values())).device
        self._layout = dict(_layout(weights))
        self._memory = DeviceMemory.allocate(max(end for _, end in self._layout.values()), self.device)
        self._tensors = _tensors(self._memory, weights, self._layout)

    def write(self, model: nn.Module) -> None:
        """Copy the model's weights; done when this returns."""
        with torch.no_grad():
            # One launch for hundreds of tensors.
            torch._foreach_copy_(list(self._tensors.values()), [weight.detach() for weight in model.parameters()])
        torch.cuda.synchronize(self.device)

    def description(self) -> bytes:
        """Return the IPC handle, GPU and layout of the weights as JSON."""
        tensors = {name: [str(x.dtype), list(x.shape), self._layout[name][0]] for name, x in self._tensors.items()}
        memory = {"handle": self._memory.handle.hex(), "uuid": device_uuid(self.device).hex()}
        return json.dumps({**memory, "bytes": self._memory.nbytes, "tensors": tensors}).encode()


def why_not_on_device(model: nn.Module) -> str | None:
    """Return why a model's weights cannot be shared by CUDA IPC; None if they can."""
    if next(model.parameters()).device.type != "cuda":
        return "the student is not on a GPU"
    return None if bindings_installed() else 'the package cuda-bindings (extra "gpu") is not installed'


def read_device_weights(description: bytes, model: nn.Module) -> None:
    """Copy weights in another process's device memory into a model; done when this returns.

    Args:
        description: As the trainer wrote it.
        model: The student, as the trainer loads it.

    Raises:
        InputError: The weights are not this model's, or their memory cannot be opened.
    """
    weights = dict(model.named_parameters())
    try:
        named: dict[str, Any] = json.loads(description)
        # Ends are computed from this process's own shapes: a message only says where tensors begin.
        layout = {name: (start, _end(start, weights[name])) for name, (_, _, start) in named["tensors"].items()}
        same = all(
            [str(weights[name].dtype), list(weights[name].shape)] == [dtype, shape]
            for name, (dtype, shape, _) in named["tensors"].items()
        )
        handle, uuid, size = bytes.fromhex(named["handle"]), bytes.fromhex(named["uuid"]), int(named["bytes"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"the published weights are not those of the run's student: {first_line(error)}") from error
    if not same or layout.keys() != weights.keys() or max(end for _, end in layout.values()) > size:
        raise InputError("the published weights are not those of the run's student")
    home = device_of(uuid) if torch.cuda.is_available() else None
    if home is None:
        raise InputError(
            "the published weights lie on a GPU that this process does not see: give trainer and rollout workers the "
            'same CUDA_VISIBLE_DEVICES, or set rollout.weights = "shared_memory"'
        )
    try:
        memory = DeviceMemory.open(handle, size, home)
    except (CudaError, SignalError) as error:  # their trainer has ended
        raise InputError(f"the published weights cannot be opened: {error}") from error
    with torch.no_grad():
        torch._foreach_copy_(list(weights.values()), list(_tensors(memory, weights, layout).values()))
    torch.cuda.synchronize(home)


def _layout(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each tensor's name with its first byte and the byte behind its last."""
    start = 0
    for name, weight in weights.items():
        end = _end(start, weight)
        yield name, (start, end)
        start = -(-end // ALIGNMENT) * ALIGNMENT


def _end(start: int, weight: Tensor) -> int:
    return int(start) + weight.numel() * weight.element_size()


def _tensors(
    memory: DeviceMemory, weights: Mapping[str, Tensor], layout: Mapping[str, tuple[int, int]]
) -> dict[str, Tensor]:
    """Return tensors over the memory, in the order of the weights; they keep it alive."""
    flat = memory.tensor()
    return {name: flat[slice(*layout[name])].view(weight.dtype).view(weight.shape) for name, weight in weights.items()}
