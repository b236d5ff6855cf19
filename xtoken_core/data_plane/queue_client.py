"""Client of a queue over a transport: sessions, waiting, repeating, and looking into the queue.

`RunClient` adds the calls of a training run, `TaskClient` those of the generic task queue. Nothing here imports torch:
rows are `xtoken_core.wire.Column`s, and `compat.samples` puts TensorDicts on top.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from xtoken_core.data_plane.transport import Transport
from xtoken_core.errors import StaleSessionError
from xtoken_core.wire import Column, QueueError, unpack_columns
from xtoken_core.wire import messages as m
from xtoken_core.wire.bounds import MAX_NAME
from xtoken_core.wire.columns import Buffer

R = TypeVar("R", bound=m.Reply)
POLL_S = 5.0
"""A call that waits longer asks anew this often, so that it notices a lost connection."""


class _Lane(threading.local):
    """Lane of a thread: it has one request open at a time, so the queue keeps only the last reply of each lane."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Take a new random lane and count its requests from one."""
        self.name = secrets.token_hex(8)
        self.numbers = itertools.count(1)


_lane = _Lane()
os.register_at_fork(after_in_child=_lane.renew)  # else a child would get the cached replies of its parent's requests


def new_id() -> str:
    """Return a unique request id: this thread's lane and the next number in it."""
    return f"{_lane.name}.{next(_lane.numbers)}"


class AlreadyDone(Exception):  # noqa: N818 - a signal to the caller's loop, not a failure
    """The task has done these samples: nothing is left to lease."""


class QueueClient:
    """Client of a queue with at most one session. Safe to use from several threads.

    Calls that may have to wait take `wait_s` and return None if nothing came in that time. Every call has a deadline:
    `wait_s` and then the time that the transport allows for a reply.

    Args:
        transport: How requests reach the queue.

    Raises:
        StaleSessionError: From any call after hello, once the queue has ended the session.
        QueueUnreachableError: From any call without a reply.
        QueueError: From any call that the queue refuses; `code` says why.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.session = ""
        self.partition = ""
        self.run_document = b""
        self._largest = 0

    def close(self) -> None:
        """Close the transport without ending the session."""
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bye()
        self.close()

    # Sessions

    def hello(
        self,
        name: str,
        role: str,
        *,
        incarnation: int,
        rank: int = 0,
        silence_s: float = 30.0,
        needs_run: bool = False,
        wait_s: float = 0.0,
    ) -> bool:
        """Open a session; False if `needs_run` and no run was opened in time."""

        def make(slice_s: float) -> m.Hello:
            return m.Hello(
                id=new_id(),
                versions=[m.VERSION],
                name=name,
                role=role,
                incarnation=incarnation,
                rank=rank,
                silence_s=silence_s,
                needs_run=needs_run,
                wait_s=slice_s,
            )

        welcome = self.wait(make, m.Welcome, wait_s)
        if welcome is None:
            return False
        reply = welcome[0]
        self.session, self.partition, self.run_document = reply.session, reply.partition, reply.run
        self._largest = reply.memory_limit
        return True

    def heartbeat(self, phase: str, progress: int, activity: str = "") -> None:
        """Keep the session alive and report the units of work finished so far, and work that takes long."""
        request = m.Heartbeat(**self.head(), phase=phase, progress=progress, activity=activity[:MAX_NAME])
        self.ask(request, m.Ok)

    def bye(self) -> None:
        """End the session, if there is one."""
        if not self.session:
            return
        try:
            self.ask(m.Bye(**self.head()), m.Ok)
        except StaleSessionError:
            pass
        finally:
            self.session = ""

    # Inspection

    def stats(self) -> dict[str, Any]:
        """Return the queue's statistics."""
        reply, _ = self.ask(m.Stats(**self.head()), m.StatsReply)
        document: dict[str, Any] = json.loads(reply.document)
        return document

    def peek(self, partition: str, sample: int) -> m.Peeked:
        """Return the state of one sample."""
        return self.ask(m.Peek(**self.head(partition), sample=sample), m.Peeked)[0]

    def list_samples(
        self, partition: str, state: str, *, task: str = "", after: int = -1, limit: int = 1024
    ) -> m.Listed:
        """Return ids in a state of a task, or `dead` or `skipped` ones."""
        request = m.ListSamples(**self.head(partition), task=task, state=state, after=after, limit=limit)
        return self.ask(request, m.Listed)[0]

    # Requests

    def head(self, partition: str | None = None) -> dict[str, str]:
        """Return the fields that all requests of the session have, with a new id, or all about a partition."""
        of = {} if partition is None else {"partition": partition}
        return {"id": new_id(), "session": self.session, **of}

    def ask(self, request: m.Request, kind: type[R], buffers: Sequence[Buffer] = ()) -> tuple[R, list[Buffer]]:
        """Send a request that is answered at once; its reply must be of this kind."""
        reply, frames = self._send(request, buffers, 0.0)
        return _expect(reply, kind), frames

    def wait(self, make: Callable[[float], m.Request], kind: type[R], wait_s: float) -> tuple[R, list[Buffer]] | None:
        """Long-poll: resend the request in slices until answered or `wait_s` has passed."""
        left = wait_s
        while True:
            slice_s = min(left, POLL_S)
            reply, frames = self._send(make(slice_s), (), slice_s)
            if not isinstance(reply, m.Empty):
                return _expect(reply, kind), frames
            left -= slice_s
            if left <= 0:
                return None

    def wait_for_claim(
        self, make: Callable[[float], m.Request], wait_s: float
    ) -> tuple[m.Claimed, dict[str, Column]] | None:
        """Send a claim and wait for it; return the lease and the columns that come with it."""
        claim = self.wait(make, m.Claimed, wait_s)
        return (claim[0], unpack_columns(claim[0].columns, claim[1])) if claim else None

    def _send(self, request: m.Request, buffers: Sequence[Buffer], wait_s: float) -> tuple[m.AnyReply, list[Buffer]]:
        if isinstance(request, m.SessionRequest) and not request.session:
            raise StaleSessionError("this client has no session: say hello first")
        size = max((memoryview(buffer).nbytes for buffer in buffers), default=0)
        if 0 < self._largest < size:  # the queue would cut the connection, however often it is sent
            raise QueueError(
                "too_large",
                f"a column has a buffer of {size} bytes, and the queue's memory limit is {self._largest}: send fewer "
                "rows at once, or raise the limit",
            )
        return self.transport.exchange(request, buffers, wait_s)


def _expect(reply: m.AnyReply, kind: type[R]) -> R:
    """Return a reply of the expected kind, or raise what it stands for."""
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, m.Failure):
        if reply.code == "stale_session":
            raise StaleSessionError(reply.message)
        code: Any = reply.code
        raise QueueError(code, reply.message, reply.detail)
    if isinstance(reply, m.AlreadyDone):
        raise AlreadyDone
    raise QueueError("bad_frame", f"a {type(reply).__name__} came where a {kind.__name__} was expected")
