"""The machine that a run's defaults are chosen for. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Cores and memory.

    Attributes:
        cores: CPU cores that this process may use.
        gpu_bytes: Memory of the smallest GPU; 0 without a GPU.
    """

    cores: int
    gpu_bytes: int = 0

    @classmethod
    def of_this(cls) -> Machine:
        """Return the machine that this process runs on."""
        return cls(len(os.sched_getaffinity(0)), _smallest_gpu())


def _smallest_gpu() -> int:
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return 0
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
    except Exception:
        return 0
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return min((int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles), default=0)
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()
