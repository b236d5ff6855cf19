"""Device memory outside torch's allocator, shared with another process through CUDA's own handles.

Torch's exported tensors keep counters between processes and wait on an event only at the first rebuild; plain memory
from `cudaMalloc` does neither, and its 64-byte handle is a value that travels. The calls come from `cuda.bindings`
(package `cuda-bindings`, extra `gpu`).
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from xtoken_core.errors import ConfigError, XtokenError
from xtoken_core.transports.ring import SignalError

HANDLE_BYTES = 64
UUID_BYTES = 16
GRANULE = 2 << 20
"""An allocation of whole granules shares its pages with no other, so that its handle opens nothing else."""


class CudaError(XtokenError):
    """A call of the CUDA runtime failed."""

    def __init__(self, call: str, code: Any) -> None:
        super().__init__(f"{call} failed: {getattr(code, 'name', code)}")
        self.code = getattr(code, "name", str(code))


@cache
def runtime() -> Any:
    """Return the CUDA runtime's bindings.

    Raises:
        ConfigError: If they are not installed.
    """
    try:
        return import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise ConfigError(
            "the transport cuda_ipc needs the package cuda-bindings: pip install cuda-bindings, or set "
            'workers.transport = "shared_memory"'
        ) from error


def bindings_installed() -> bool:
    """Return whether the CUDA runtime's bindings are installed."""
    try:
        runtime()
    except ConfigError:
        return False
    return True


class DeviceMemory:
    """Bytes on a GPU; a tensor over them keeps them alive.

    Attributes:
        device: Where they are.
        nbytes: How many.
        handle: What another process opens them by; empty for memory that was opened itself.
    """

    def __init__(self, address: int, nbytes: int, device: torch.device, *, handle: bytes = b"") -> None:
        self.address, self.nbytes, self.device, self.handle = address, nbytes, device, handle
        release = "cudaFree" if handle else "cudaIpcCloseMemHandle"
        # Not `__del__`: finalizers also run at interpreter exit, in an order that still has the runtime.
        weakref.finalize(self, _release, release, address, device.index, os.getpid())

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> DeviceMemory:
        """Allocate memory that other processes may open.

        Raises:
            CudaError: If there is no room (`cudaErrorMemoryAllocation`), or it cannot be shared.
        """
        with _current(device.index):
            address = int(_call("cudaMalloc", -(-nbytes // GRANULE) * GRANULE))
            try:
                handle = _handle_bytes(_call("cudaIpcGetMemHandle", address))
            except BaseException:
                _call("cudaFree", address)
                raise
        return cls(address, nbytes, device, handle=handle)

    @classmethod
    def open(cls, handle: bytes, nbytes: int, device: torch.device) -> DeviceMemory:
        """Open another process's memory on a device that this process sees.

        Raises:
            SignalError: If the handle is none.
            CudaError: If it cannot be opened.
        """
        if len(handle) != HANDLE_BYTES:
            raise SignalError(f"a handle of device memory has {HANDLE_BYTES} bytes, not {len(handle)}")
        cudart = runtime()
        # The binding's type has no public constructor from bytes, so they are copied to its address.
        wanted = cudart.cudaIpcMemHandle_t()
        ctypes.memmove(int(wanted.getPtr()), handle, HANDLE_BYTES)
        with _current(device.index):
            address = int(_call("cudaIpcOpenMemHandle", wanted, cudart.cudaIpcMemLazyEnablePeerAccess))
        return cls(address, nbytes, device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}

    def tensor(self) -> UInt8[Tensor, " n"]:
        """Return the bytes as a tensor: nothing is allocated or copied."""
        return torch.as_tensor(self, device=self.device)


def _handle_bytes(handle: Any) -> bytes:
    """Return the bytes of a `cudaIpcMemHandle_t`.

    They are read at its address: the attribute `reserved` is not there in all versions of the bindings.
    """
    return ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES)


def device_uuid(device: torch.device) -> bytes:
    """Return the UUID of a GPU, which does not depend on its number in this process.

    Raises:
        CudaError: If there is no such device.
    """
    return bytes(_call("cudaGetDeviceProperties", device.index).uuid.bytes)[:UUID_BYTES]


def device_of(uuid: bytes) -> torch.device | None:
    """Return the device with this UUID, by the number it has in this process; None if the process does not see it."""
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if device_uuid(device) == uuid:
            return device
    return None


@contextmanager
def _current(index: int) -> Iterator[None]:
    """Make a device this thread's current one inside the block; the previous one is restored for torch."""
    before = int(_call("cudaGetDevice"))
    _call("cudaSetDevice", index)
    try:
        yield
    finally:
        _call("cudaSetDevice", before)


def _call(name: str, *arguments: Any) -> Any:
    code, *values = getattr(runtime(), name)(*arguments)
    if int(code) != 0:
        raise CudaError(name, code)
    return values[0] if values else None


def _release(name: str, address: int, index: int, owner: int) -> None:
    """Free memory. A forked child has no CUDA context and does not touch its parent's memory."""
    if os.getpid() != owner:
        return
    with suppress(CudaError), _current(index):  # a device that is lost has nothing to give back
        _call("cudaDeviceSynchronize")
        _call(name, address)
