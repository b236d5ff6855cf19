"""In-memory transport: the server's engine behind a lock."""

import threading
import time
from collections.abc import Callable, Sequence

from xtoken_core.compat.task_client import TaskClient
from xtoken_core.data_plane.transport import Reply, Transport
from xtoken_core.queue.any_partition import any_partition
from xtoken_core.queue.engine import Engine
from xtoken_core.wire import QueueError
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import Buffer, bytes_view


class MemoryQueue:
    """Queue that several clients of one process share."""

    def __init__(self, *, memory_limit: int = 1 << 30, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = Engine(memory_limit=memory_limit, clock=clock, opens=any_partition)
        self.changed = threading.Condition()

    def connect(self) -> TaskClient:
        """Return a client of this queue."""
        return TaskClient(InMemoryTransport(self))


class InMemoryTransport(Transport):
    """Access to a `MemoryQueue`. Headers pass through the wire's encoding, so that its bounds hold here too."""

    url = "memory"

    def __init__(self, queue: MemoryQueue) -> None:
        self.queue = queue

    def exchange(self, request: m.Request, buffers: Sequence[Buffer], wait_s: float) -> Reply:
        """Answer a request at once, or after the change that it waits for."""
        typed = m.decode_request(m.encode(request))
        copies = [bytes_view(buffer).tobytes() for buffer in buffers]
        engine, deadline = self.queue.engine, time.monotonic() + wait_s
        waited = False
        with self.queue.changed:
            while True:
                engine.tick()
                before = engine.changes
                try:
                    response = engine.handle(typed, copies, waited=waited)
                except QueueError as error:
                    return m.Failure(id=request.id, code=error.code, message=str(error), detail=error.detail), []
                finally:
                    if engine.changes != before:
                        self.queue.changed.notify_all()
                if response is not None:
                    frames: list[Buffer] = list(response.frames())
                    return m.decode_reply(m.encode(response.reply)), frames
                left = deadline - time.monotonic()
                if left <= 0:
                    return engine.answer_empty(typed), []
                self.queue.changed.wait(min(left, 1.0))
                waited = True

    def close(self) -> None:
        """Do nothing: there is no connection."""
