"""Timing of the parts of a step on a device, by CUDA events and without synchronisation."""

from __future__ import annotations

import time
from collections import defaultdict

import torch


class DeviceTimer:
    """Seconds between laps on one device; on a GPU by events in the current stream.

    Args:
        device: Device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: float | torch.cuda.Event = 0.0
        self._laps: list[tuple[str, float | torch.cuda.Event, float | torch.cuda.Event]] = []

    def reset(self) -> None:
        """Drop all laps."""
        self._laps.clear()

    def start(self) -> None:
        """Start the first lap."""
        self._began = self._now()

    def lap(self, name: str) -> None:
        """End a lap under a name, and start the next one."""
        now = self._now()
        self._laps.append((name, self._began, now))
        self._began = now

    def collect(self) -> dict[str, float]:
        """Return the seconds of all laps since the last call, summed by name, and reset.

        On a GPU it waits for the last lap's event: call it once the step's metrics have been read, when nothing is left
        to wait for.
        """
        seconds: defaultdict[str, float] = defaultdict(float)
        for name, began, ended in self._laps:
            if isinstance(began, torch.cuda.Event):
                ended.synchronize()  # type: ignore[union-attr]
                seconds[name] += began.elapsed_time(ended) / 1e3  # type: ignore[arg-type]
            else:
                seconds[name] += ended - began  # type: ignore[operator]
        self._laps.clear()
        return dict(seconds)

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
