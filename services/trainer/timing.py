"""How long a device takes for the parts of a step, told without making anybody wait for it."""

from __future__ import annotations

import time
from collections import defaultdict

import torch


class Stopwatch:
    """Seconds between laps on one device; on a GPU by events in the current stream, which is not waited for.

    Args:
        device: Whose.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: float | torch.cuda.Event = 0.0
        self._laps: list[tuple[str, float | torch.cuda.Event, float | torch.cuda.Event]] = []

    def forget(self) -> None:
        """Drop the laps that nobody has asked for."""
        self._laps.clear()

    def start(self) -> None:
        """The next lap begins here."""
        self._began = self._now()

    def lap(self, name: str) -> None:
        """A part ends here, and the next one begins."""
        now = self._now()
        self._laps.append((name, self._began, now))
        self._began = now

    def take(self) -> dict[str, float]:
        """Seconds by part, those of one name added up, since this was last asked; begins anew.

        On a GPU it waits until the last lap is over: ask once the step's figures have been read.
        """
        found: defaultdict[str, float] = defaultdict(float)
        for name, began, ended in self._laps:
            if isinstance(began, torch.cuda.Event):
                ended.synchronize()  # type: ignore[union-attr]
                found[name] += began.elapsed_time(ended) / 1e3  # type: ignore[arg-type]
            else:
                found[name] += ended - began  # type: ignore[operator]
        self._laps.clear()
        return dict(found)

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
