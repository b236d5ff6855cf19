"""A queue inside the process: the server's own engine behind a lock. For tests, notebooks and small scripts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from xtoken_core.data_plane.client import DataPlaneClient
from xtoken_core.queue.engine import Engine
from xtoken_core.wire import QueueError
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import Buffer, bytes_view


class MemoryQueue:
    """A queue that several clients of one process share."""

    def __init__(self, *, memory_limit: int = 1 << 30, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = Engine(memory_limit=memory_limit, clock=clock)
        self.changed = threading.Condition()

    def connect(self) -> InMemoryDataPlaneClient:
        """A client of this queue."""
        return InMemoryDataPlaneClient(self)


class InMemoryDataPlaneClient(DataPlaneClient):
    """A client of a `MemoryQueue`. Headers pass through the wire's encoding, so that its bounds hold here too."""

    def __init__(self, queue: MemoryQueue) -> None:
        super().__init__()
        self.queue = queue

    def exchange(self, request: m.Request, buffers: Sequence[Buffer], wait_s: float) -> tuple[m.AnyReply, list[Buffer]]:
        """Answer at once, or after the change that the request waits for."""
        typed = m.decode_request(m.encode(request))
        copies = [bytes_view(buffer).tobytes() for buffer in buffers]
        engine, deadline = self.queue.engine, time.monotonic() + wait_s
        waited = False
        with self.queue.changed:
            while True:
                engine.tick()
                before = engine.changes
                try:
                    answer = engine.handle(typed, copies, waited=waited)
                except QueueError as error:
                    return m.Failure(id=request.id, code=error.code, message=str(error), detail=error.detail), []
                finally:
                    if engine.changes != before:
                        self.queue.changed.notify_all()
                if answer is not None:
                    frames: list[Buffer] = list(answer.frames())
                    return m.decode_reply(m.encode(answer.reply)), frames
                left = deadline - time.monotonic()
                if left <= 0:
                    return m.Empty(id=request.id), []
                self.queue.changed.wait(min(left, 1.0))
                waited = True

    def close(self) -> None:
        """Nothing to let go."""
