"""Followed logs of a run: read once for all streams, each of which continues from where it began."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool

from xtoken_services.control.logs import Follower

POLL_S, MAX_POLL_S = 0.5, 5.0
LOAD_FACTOR = 4
"""Pause between two reads, in durations of the last one: followed logs leave an overloaded server time for requests."""
KEPT_BYTES = 1 << 22
"""Size of the latest parts that are kept for streams whose peers read slowly; one behind them reads for itself."""


class Part(NamedTuple):
    """Lines of one read, and the positions in all logs after it."""

    text: bytes
    positions: dict[str, int]


class SharedLogs:
    """Reader of the lines added to a run's logs, shared by the streams that follow them.

    Args:
        output: Output directory of the run.
        worker: Follow only this worker; all if empty.
        is_over: Returns True if the run is over.
    """

    def __init__(self, output: Path, worker: str, is_over: Callable[[], bool]) -> None:
        self._output, self._worker, self._is_over = output, worker, is_over
        self._follower = Follower(output, worker)
        self._reading = threading.Lock()
        self._lock = threading.Lock()  # of the parts: never held while files are read, as the event loop takes it
        self._parts: deque[Part] = deque()
        self._first = self._bytes = 0
        self._over = False
        self._error: Exception | None = None
        self._streams = 0
        self._task: asyncio.Task[None] | None = None
        self._updated = asyncio.Event()

    def join(self) -> LogStream:
        """Return a stream of the lines added from now on; call it in a thread, as it reads files."""
        with self._reading:
            self._error = None
            self._read()
            return LogStream(self, self._first + len(self._parts), self._follower.positions)

    async def lines_from(self, stream: LogStream) -> AsyncIterator[bytes]:
        """Yield added text until the run is over."""
        with self._attended():
            while True:
                updated, over = self._updated, self._over
                added = self._parts_from(stream)
                if added is None:
                    added = await run_in_threadpool(stream.own_follower(self._output, self._worker).read)
                if added:
                    yield added
                if self._error is not None:
                    raise self._error
                if over:
                    return
                await updated.wait()

    def _parts_from(self, stream: LogStream) -> bytes | None:
        """Return the parts that a stream has not had; None if it is behind those that are kept."""
        with self._lock:
            if stream.own is not None or stream.number < self._first:
                return None
            new = list(self._parts)[stream.number - self._first :]
            stream.number += len(new)
            if new:
                stream.positions = new[-1].positions
        return b"".join(part.text for part in new)

    @contextmanager
    def _attended(self) -> Iterator[None]:
        """Read the logs regularly while there are streams."""
        self._streams += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read_regularly())
        try:
            yield
        finally:
            self._streams -= 1

    async def _read_regularly(self) -> None:
        while self._streams and not self._over and self._error is None:
            began = time.monotonic()
            try:
                await run_in_threadpool(self._update)
            except Exception as error:  # raised again by every stream
                self._error = error
            pause = pause_after(time.monotonic() - began)
            updated, self._updated = self._updated, asyncio.Event()
            updated.set()
            if not self._over:
                await asyncio.sleep(pause)

    def _update(self) -> None:
        with self._reading:
            self._read()

    def _read(self) -> None:
        over = self._is_over()  # first, so that the last lines are read after the end
        if text := self._follower.read():
            with self._lock:
                self._parts.append(Part(text, self._follower.positions))
                self._bytes += len(text)
                while self._bytes > KEPT_BYTES:
                    self._bytes -= len(self._parts.popleft().text)
                    self._first += 1
        self._over = over


class LogStream:
    """Stream of the lines added to a run's logs.

    Attributes:
        number: The next part of the shared logs.
        positions: Positions in all logs up to which it has had them.
        own: Follower of its own, once it is too far behind the others.
    """

    def __init__(self, shared: SharedLogs, number: int, positions: dict[str, int]) -> None:
        self._shared, self.number, self.positions = shared, number, positions
        self.own: Follower | None = None

    def lines(self) -> AsyncIterator[bytes]:
        """Yield complete lines as they are added, until the run is over."""
        return self._shared.lines_from(self)

    def own_follower(self, output: Path, worker: str) -> Follower:
        """Return the stream's own follower, which continues from its positions."""
        if self.own is None:
            self.own = Follower(output, worker, self.positions)
        return self.own


def pause_after(seconds: float) -> float:
    """Return the seconds until logs are read again, after a read that took so long, including the wait for a thread."""
    return min(MAX_POLL_S, max(POLL_S, LOAD_FACTOR * seconds))
