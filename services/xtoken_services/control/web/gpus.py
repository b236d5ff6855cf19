"""Memory and utilization of this machine's NVIDIA GPUs, from NVML."""

from __future__ import annotations

import contextlib
from typing import Any

import pynvml  # type: ignore[import-untyped]


class Gpus:
    """The GPUs that NVML lists; none on a machine without the driver."""

    def __init__(self) -> None:
        self._devices: dict[int, Any] = {}
        self._open = False
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            self._open = True
            for index in range(pynvml.nvmlDeviceGetCount()):
                with contextlib.suppress(pynvml.NVMLError):  # one lost GPU must not hide the others
                    self._devices[index] = pynvml.nvmlDeviceGetHandleByIndex(index)

    def sample(self) -> dict[str, float]:
        """Return `gpu_memory{i}` (bytes in use) and `gpu_use{i}` (percent) for each GPU `i`, where NVML knows them."""
        sample: dict[str, float] = {}
        for index, device in self._devices.items():
            # Asked one by one: a GPU in MIG mode has no utilization.
            with contextlib.suppress(pynvml.NVMLError):
                sample[f"gpu_memory{index}"] = pynvml.nvmlDeviceGetMemoryInfo(device).used
            with contextlib.suppress(pynvml.NVMLError):
                sample[f"gpu_use{index}"] = pynvml.nvmlDeviceGetUtilizationRates(device).gpu
        return sample

    def close(self) -> None:
        """Shut NVML down."""
        if self._open:
            pynvml.nvmlShutdown()
            self._open, self._devices = False, {}
