"""The machine that a run's defaults are chosen for. No torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xtoken_core.transports.shared_files import DIRECTORY

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Machine:
    """Cores and memory.

    Attributes:
        cores: CPU cores that this process may use.
        gpu_bytes: Memory of the smallest GPU; 0 without a GPU.
        memory_bytes: Memory of the host that can be used now; 0 if unknown.
        shared_bytes: Bytes that are free in `/dev/shm`; 0 if unknown.
        gpus: Number of GPUs; 0 if unknown.
    """

    cores: int
    gpu_bytes: int = 0
    memory_bytes: int = 0
    shared_bytes: int = 0
    gpus: int = 0

    @classmethod
    def of_this(cls) -> Machine:
        """Return the machine that this process runs on."""
        gpus = _gpu_bytes()
        cores, smallest = len(os.sched_getaffinity(0)), min(gpus, default=0)
        return cls(cores, smallest, available_memory(), _free_bytes(DIRECTORY), len(gpus))


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory so far, on this machine or in this cgroup."""
    return _number(PROC / "vmstat", "oom_kill") + sum(_number(c / "memory.events", "oom_kill") for c in _cgroups())


def available_memory() -> int:
    """Return the bytes of memory that can still be used here: what the machine has, or a cgroup's limit leaves."""
    available = _number(PROC / "meminfo", "MemAvailable") << 10
    for cgroup in _cgroups():
        limit, used = (_number(cgroup / f"memory.{name}") for name in ("max", "current"))
        if limit:  # pages of files that nothing has open count as used, and are given back
            available = min(available, max(0, limit - used + _number(cgroup / "memory.stat", "inactive_file")))
    return available


def _free_bytes(directory: Path) -> int:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return 0


def _cgroups() -> Iterator[Path]:
    """Yield the directories of this process's control group (version 2) and of those around it."""
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("0::"):
            own = CGROUPS / line.removeprefix("0::").strip("/")
            yield from (path for path in (own, *own.parents) if path.is_relative_to(CGROUPS))


def _number(path: Path, name: str = "") -> int:
    """Return a file's only number, or the one beside a name; 0 if it has none."""
    try:
        rows = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
        return next(int(row[1] if name else row[0]) for row in rows if not name or row[0] == name)
    except (OSError, ValueError, IndexError, StopIteration):
        return 0


def count_gpus() -> int:
    """Return the number of GPUs that this process may use; 0 without one, or if it cannot be determined."""
    return len(_gpu_bytes())


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    count = count_gpus()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


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

    def named(handles: list[Any], name: str) -> Any:
        """Return the GPU with this number or UUID, of which the beginning will do; else a part of one (MIG)."""
        if name.isdigit():
            return handles[int(name)]
        of_uuid = (each for each in handles if name and str(pynvml.nvmlDeviceGetUUID(each)).startswith(name))
        return next(of_uuid, None) or pynvml.nvmlDeviceGetHandleByUUID(name)

    sizes = []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        for name in map(str, range(len(handles))) if visible == "all" else visible.split(","):
            sizes.append(int(pynvml.nvmlDeviceGetMemoryInfo(named(handles, name.strip())).total))
    except (pynvml.NVMLError, IndexError):
        pass  # as CUDA does: what is named after an unknown GPU is not visible either
    finally:
        pynvml.nvmlShutdown()
    return sizes
