"""SIGINT, SIGTERM and SIGHUP, counted instead of obeyed: whoever is asked to leave has things to end first."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.25


class Interrupts:
    """While this is entered, signals are counted. In another than the main thread it does nothing.

    Attributes:
        count: How many have come.
        status: What a process that obeys the first of them exits with; 0 before.
    """

    def __init__(self) -> None:
        self.count = 0
        self.status = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in SIGNALS if not _ignored(number)]
            self._before = {number: signal.signal(number, self._on_signal) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float = POLL_S) -> bool:
        """Let so many seconds pass; whether any signal has come yet."""
        time.sleep(seconds)
        return self.count > 0

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.status = self.status or 128 + number


def _ignored(number: signal.Signals) -> bool:
    """Whether a hang-up is none of ours, as under `nohup`."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
