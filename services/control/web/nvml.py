"""Memory and use of this machine's NVIDIA GPUs, by the driver's own library; nothing where there is none."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

LIBRARY = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    """`nvmlUtilization_t`."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Nvml:
    """The GPUs, as NVML tells of them (its API reference: `nvmlDeviceGetMemoryInfo`, `…GetUtilizationRates`)."""

    def __init__(self) -> None:
        self._library: Any = None
        self._devices: list[ctypes.c_void_p] = []
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(LIBRARY)
            if library.nvmlInit_v2() == 0:
                self._library = library
                self._devices = self._found()

    def _found(self) -> list[ctypes.c_void_p]:
        count = ctypes.c_uint()
        if self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        devices = []
        for index in range(count.value):
            device = ctypes.c_void_p()
            if self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) == 0:
                devices.append(device)
        return devices

    def sample(self) -> dict[str, float]:
        """Per GPU `gpu_memory{i}` in bytes in use and `gpu_use{i}` in percent of the last moment's time."""
        found: dict[str, float] = {}
        for index, device in enumerate(self._devices):
            memory, use = _Memory(), _Utilization()
            if self._library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
                found[f"gpu_memory{index}"] = memory.used
            if self._library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(use)) == 0:
                found[f"gpu_use{index}"] = use.gpu
        return found

    def close(self) -> None:
        """Let the library go."""
        if self._library is not None:
            self._library.nvmlShutdown()
            self._library, self._devices = None, []
