"""Time series of runs whose pages are open: queue depth, and the GPUs of this machine."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import Any

import pynvml  # type: ignore[import-untyped]
from fastapi import Request

from xtoken_services.control.api.dependencies import AppContext

INTERVAL_S = 2.0
MAX_SAMPLES = 3600
MAX_RUNS = 32


class Gauges:
    """Samples of watched runs over the last two hours.

    A run is sampled from the first time its page is opened until it is over, by one thread for all runs. The samples
    come from the runs' views; no request is sent to a worker or a queue.

    Args:
        context: The application's context.
    """

    def __init__(self, context: AppContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._samples: dict[str, deque[dict[str, Any]]] = {}
        self._watched: set[str] = set()
        self._thread: threading.Thread | None = None

    def watch(self, run_id: str) -> None:
        """Start sampling a run."""
        with self._lock:
            if run_id in self._watched or len(self._watched) >= MAX_RUNS or not self._is_active(run_id):
                return
            self._watched.add(run_id)
            while len(self._samples) >= MAX_RUNS and (past := next(iter(self._samples.keys() - self._watched), None)):
                del self._samples[past]
            self._samples.setdefault(run_id, deque(maxlen=MAX_SAMPLES))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="gauges", daemon=True)
                self._thread.start()

    def since(self, run_id: str, after: float) -> list[dict[str, Any]]:
        """Return the samples of a run taken after a Unix time."""
        with self._lock:
            return [sample for sample in self._samples.get(run_id, ()) if sample["time"] > after]

    def _work(self) -> None:
        gpus = Gpus()
        try:
            while True:
                machine = gpus.sample()
                with self._lock:
                    self._watched = {run_id for run_id in self._watched if self._is_active(run_id)}
                    if not self._watched:
                        self._thread = None
                        return
                    for run_id in self._watched:
                        status = self._context.views.status(run_id)
                        depth = {"queue_samples": status.queue.samples} if status is not None and status.queue else {}
                        self._samples[run_id].append({"time": round(time.time(), 1), **depth, **machine})
                time.sleep(INTERVAL_S)
        finally:
            gpus.close()

    def _is_active(self, run_id: str) -> bool:
        status = self._context.views.status(run_id)
        return status is not None and not status.state.over


def gauges_of(request: Request) -> Gauges:
    """Return the gauges of the application that serves a request."""
    gauges: Gauges = request.app.state.gauges
    return gauges


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
