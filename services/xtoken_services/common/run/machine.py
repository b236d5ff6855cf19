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


def count_gpus() -> int:
    """Return the number of GPUs that this process may use; 0 without one, or if it cannot be determined."""
    return len(_gpu_bytes())


def _smallest_gpu() -> int:
    return min(_gpu_bytes(), default=0)


def _gpu_bytes() -> list[int]:
    """Return the memory of every GPU that may be used, by the driver's library, if it is installed."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    if visible in ("", "-1"):
        return []
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
    except Exception:
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        sizes = [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
    return sizes if visible == "all" else sizes[: len(visible.split(","))]
