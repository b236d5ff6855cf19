"""SIGINT, SIGTERM and SIGHUP, counted instead of obeyed, so that a command can shut down gracefully."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.25


class Interrupts:
    """Context in which signals are counted; it does nothing outside the main thread.

    Attributes:
        count: Number of signals received.
        status: Exit status for the first of them, 128 + its number; 0 before.
    """

    def __init__(self) -> None:
        self.count = 0
        self.status = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in SIGNALS if not _ignored(number)]
            self._previous = {number: signal.signal(number, self._on_signal) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def wait(self, seconds: float = POLL_S) -> bool:
        """Sleep, then return whether a signal has come yet."""
        time.sleep(seconds)
        return self.count > 0

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.status = self.status or 128 + number


def _ignored(number: signal.Signals) -> bool:
    """Return whether a hang-up is ignored already, as under `nohup`."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
