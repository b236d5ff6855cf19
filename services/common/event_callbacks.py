"""What a worker says once the device has done its part: in order, from a thread, while the main loop queues more work.

Only events of this process are waited for, on the host. On a CPU the work is done when it is asked for, so an action
runs at once, in the caller's thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from xtoken_core.errors import XtokenError
from xtoken_core.wire import QueueError

Action = Callable[[], None]
LEAVE_S = 30.0


class Completions:
    """Actions that follow what was queued on a device.

    Args:
        device: Where the work runs.
        name: The thread's name, and what an error calls its work.
        limit_s: How long the device may take for one piece of work before it counts as stuck.
    """

    def __init__(self, device: torch.device, name: str, *, limit_s: float) -> None:
        self.device, self.name, self.limit_s = device, name, limit_s
        self._waiting: deque[tuple[torch.cuda.Event, Action, float]] = deque()
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._leaving = False
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()

    def after(self, action: Action) -> None:
        """Do this once everything that is queued on the device's current stream by now has completed.

        Raises:
            Exception: What an earlier action has raised.
        """
        self.check()
        if self._thread is None:
            action()
            return
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        with self._changed:
            self._waiting.append((event, action, time.monotonic()))
            self._changed.notify_all()

    def check(self) -> None:
        """Whether all goes well; to be asked wherever the main loop waits.

        Raises:
            Exception: What an action has raised, once.
            XtokenError: The device has not finished a piece of work in time.
        """
        with self._changed:
            error, self._error = self._error, None
            since = self._waiting[0][2] if self._waiting else time.monotonic()
        if error is not None:
            raise error
        if time.monotonic() - since > self.limit_s:
            raise XtokenError(f"{self.name}: {self.device} has not finished its work for {self.limit_s:g} s")

    def settle(self) -> None:
        """Wait until every action has run.

        Raises:
            Exception: As `check`.
        """
        while True:
            self.check()
            with self._changed:
                if not self._waiting and self._error is None:
                    return
                self._changed.wait_for(lambda: not self._waiting or self._error is not None, timeout=1.0)

    def close(self) -> None:
        """Leave out the actions that still wait, and end the thread."""
        with self._changed:
            self._leaving = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(LEAVE_S)

    def _work(self) -> None:
        torch.cuda.set_device(self.device)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._leaving)
                if self._leaving:
                    return
                event, action, _ = self._waiting[0]
            try:
                event.synchronize()
                if not self._leaving:
                    action()
            except QueueError as error:  # what was refused does not stop what follows
                self._done(error)
            except Exception as error:
                self._done(error, fatal=True)
                return
            else:
                self._done()

    def _done(self, error: Exception | None = None, *, fatal: bool = False) -> None:
        with self._changed:
            if fatal:
                self._waiting.clear()
                self._leaving = True
            else:
                self._waiting.popleft()
            self._error = self._error or error
            self._changed.notify_all()
