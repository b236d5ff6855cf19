"""Memory that all processes use on one GPU, as its driver counts it, while a command runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from types import TracebackType

PERIOD_S = 0.5


class GpuMemory:
    """A context that samples the memory in use; without a GPU it has nothing to show.

    The GPU is the first of CUDA_VISIBLE_DEVICES.
    """

    def __init__(self) -> None:
        self._samples: list[int] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="gpu memory", daemon=True)

    def __enter__(self) -> GpuMemory:
        self._read()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def summary(self) -> dict[str, int]:
        """Return the memory in use before, and the most that was in use, in bytes."""
        if not self._samples:
            return {}
        return {"gpu_before_bytes": self._samples[0], "gpu_peak_bytes": max(self._samples)}

    def _sample(self) -> None:
        while not self._done.wait(PERIOD_S):
            self._read()

    def _read(self) -> None:
        if shutil.which("nvidia-smi") is None:
            return
        device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        command = ["nvidia-smi", "-i", device, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            self._samples.append(int(answer.stdout.split()[0]) << 20)
