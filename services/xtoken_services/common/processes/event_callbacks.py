"""Callbacks after CUDA events: run in order by a thread, while the main loop enqueues more work.

The thread waits on the host, and only for events of this process: an event of another process that died would never be
signalled, and a stream that waits for it would hang for good. On a CPU the work is done when `after` is called, so a
callback runs at once, in the caller's thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from xtoken_core.errors import XtokenError
from xtoken_core.wire import QueueError

Callback = Callable[[], None]
JOIN_S = 30.0


class EventCallbacks:
    """Callbacks that follow the work enqueued on a device.

    Args:
        device: Device that does the work.
        name: Name of the thread, also in errors.
        limit_s: Seconds that the device may take before it counts as stuck.
    """

    def __init__(self, device: torch.device, name: str, *, limit_s: float) -> None:
        self.device, self.name, self.limit_s = device, name, limit_s
        self._pending: deque[tuple[torch.cuda.Event, Callback, float]] = deque()
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._closing = False
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()

    def after(self, callback: Callback) -> None:
        """Run a callback once all work enqueued so far on the device's current stream has completed.

        Raises:
            Exception: Error of an earlier callback.
        """
        self.check()
        if self._thread is None:
            callback()
            return
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        with self._changed:
            self._pending.append((event, callback, time.monotonic()))
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error of a callback, if there is one; call it wherever the main loop waits.

        Raises:
            Exception: Error of a callback, once.
            XtokenError: The device has not finished its work in time.
        """
        with self._changed:
            error, self._error = self._error, None
            since = self._pending[0][2] if self._pending else time.monotonic()
        if error is not None:
            raise error
        if time.monotonic() - since > self.limit_s:
            raise XtokenError(f"{self.name}: {self.device} has not finished its work for {self.limit_s:g} s")

    def drain(self) -> None:
        """Wait until every callback has run.

        Raises:
            Exception: As `check`.
        """
        while True:
            self.check()
            with self._changed:
                if not self._pending and self._error is None:
                    return
                self._changed.wait_for(lambda: not self._pending or self._error is not None, timeout=1.0)

    def close(self) -> None:
        """Drop pending callbacks and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _work(self) -> None:
        torch.cuda.set_device(self.device)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if self._closing:
                    return
                event, callback, _ = self._pending[0]
            try:
                event.synchronize()
                if not self._closing:
                    callback()
            except QueueError as error:  # a refused request does not stop the callbacks after it
                self._done(error)
            except Exception as error:
                self._done(error, fatal=True)
                return
            else:
                self._done()

    def _done(self, error: Exception | None = None, *, fatal: bool = False) -> None:
        with self._changed:
            if fatal:
                self._pending.clear()
                self._closing = True
            else:
                self._pending.popleft()
            self._error = self._error or error
            self._changed.notify_all()
