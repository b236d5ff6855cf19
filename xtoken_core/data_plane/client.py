"""The client's side of the queue: one method per call, the same for the real server and for the one in memory.

Nothing here imports torch: rows are `xtoken_core.wire.Column`s; `data_plane.samples` puts TensorDicts on top.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from xtoken_core.data_plane.stream import Stream
from xtoken_core.errors import StaleSessionError
from xtoken_core.wire import Column, QueueError, pack_columns, unpack_columns
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import Buffer

R = TypeVar("R", bound=m.Reply)
POLL_S = 5.0


class _Lane(threading.local):
    """A thread has one request open at a time: its ids say so, and the queue need not keep older answers."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin anew: as nobody else, at the first number."""
        self.name = secrets.token_hex(8)
        self.numbers = itertools.count(1)


_lane = _Lane()
os.register_at_fork(after_in_child=_lane.renew)  # else a child would be given its parent's answers


def new_id() -> str:
    """A request id that nobody else uses: this thread's lane and the next number in it."""
    return f"{_lane.name}.{next(_lane.numbers)}"


class DataPlaneClient(ABC):
    """A connection to a queue, and at most one session on it. Safe to use from several threads.

    Calls that may have to wait take `wait_s` and return None if nothing came in that time. Every call ends by a
    deadline of its own: `wait_s` and then the time the transport allows for an answer.

    Raises:
        StaleSessionError: From any call after hello, once the queue has ended the session.
        QueueUnreachableError: From any call that nobody answers.
        QueueError: From any call that the queue refuses; `code` says why.
    """

    def __init__(self) -> None:
        self.session = ""
        self.partition = ""
        self.run_document = b""

    @abstractmethod
    def exchange(self, request: m.Request, buffers: Sequence[Buffer], wait_s: float) -> tuple[m.AnyReply, list[Buffer]]:
        """Send a request, again on a new connection if its reply is lost, and return the reply with its buffers."""

    @abstractmethod
    def close(self) -> None:
        """Let the connection go, without ending the session."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bye()
        self.close()

    # Sessions

    def hello(
        self, name: str, role: str, *, incarnation: int, rank: int = 0, silence_s: float = 30.0,
        needs_run: bool = False, wait_s: float = 0.0,
    ) -> bool:  # fmt: skip
        """Open a session; False if `needs_run` and no run was opened in time."""

        def ask(slice_s: float) -> m.Hello:
            return m.Hello(
                id=new_id(), versions=[m.VERSION], name=name, role=role, incarnation=incarnation, rank=rank,
                silence_s=silence_s, needs_run=needs_run, wait_s=slice_s,
            )  # fmt: skip

        welcome = self.wait(ask, m.Welcome, wait_s)
        if welcome is None:
            return False
        reply = welcome[0]
        self.session, self.partition, self.run_document = reply.session, reply.partition, reply.run
        return True

    def heartbeat(self, phase: str, progress: int) -> None:
        """Say that the worker lives and how many units of work it has finished."""
        self.ask(m.Heartbeat(id=new_id(), session=self.session, phase=phase, progress=progress), m.Ok)

    def bye(self) -> None:
        """End the session, if there is one."""
        if not self.session:
            return
        try:
            self.ask(m.Bye(id=new_id(), session=self.session), m.Ok)
        except StaleSessionError:
            pass
        finally:
            self.session = ""

    # Partitions

    def open(
        self, partition: str, tasks: Sequence[m.TaskDef] = (), *, volatile: Sequence[str] = (), max_attempts: int = 3,
        run: m.RunDef | None = None,
    ) -> None:  # fmt: skip
        """Create a partition; the same one again is no error."""
        request = m.OpenPartition(
            id=new_id(), session=self.session, partition=partition, tasks=list(tasks), volatile=list(volatile),
            max_attempts=max_attempts, run=run,
        )  # fmt: skip
        self.ask(request, m.Ok)

    def seal(self, partition: str) -> None:
        """Say that nothing will be put any more."""
        self.ask(m.Seal(id=new_id(), session=self.session, partition=partition), m.Ok)

    def clear(self, partition: str, ids: Sequence[int] | None = None) -> None:
        """Forget these samples, or all."""
        request = m.Clear(
            id=new_id(), session=self.session, partition=partition, ids=list(ids or ()), everything=ids is None
        )
        self.ask(request, m.Ok)

    # Samples

    def put(self, partition: str, ids: Sequence[int], columns: Mapping[str, Column], *, wait_s: float = 0.0) -> int:
        """Store columns for ids; returns the bytes of room left.

        With too little room it waits up to `wait_s` for more, and sends nothing meanwhile.

        Raises:
            QueueError: `no_room` if there was too little all that time.
        """
        heads, buffers = pack_columns(dict(columns))
        deadline = time.monotonic() + wait_s
        while True:
            request = m.Put(id=new_id(), session=self.session, partition=partition, ids=list(ids), columns=heads)
            try:
                return self.ask(request, m.Stored, buffers)[0].room
            except QueueError as error:
                left = deadline - time.monotonic()
                size = sum(buffer.nbytes for buffer in buffers)
                if error.code != "no_room" or left <= 0 or self.room(partition, size, wait_s=left) is None:
                    raise

    def room(self, partition: str, nbytes: int, *, wait_s: float) -> int | None:
        """Wait until so many bytes are free; returns how many are."""
        found = self.wait(
            lambda s: m.Room(id=new_id(), session=self.session, partition=partition, bytes=nbytes, wait_s=s),
            m.Stored,
            wait_s,
        )
        return found[0].room if found else None

    def get(
        self, partition: str, ids: Sequence[int], fields: Sequence[str], *, wait_s: float = 0.0
    ) -> dict[str, Column] | None:
        """Read fields of samples, rows in the order of `ids`."""
        found = self.wait(
            lambda s: m.Get(
                id=new_id(), session=self.session, partition=partition, ids=list(ids), fields=list(fields), wait_s=s
            ),
            m.Rows,
            wait_s,
        )
        return unpack_columns(found[0].columns, found[1]) if found else None

    def claim(
        self, partition: str, task: str, *, ids: Sequence[int] = (), count: int = 0, fields: Sequence[str] = (),
        wait_s: float = 0.0,
    ) -> tuple[m.Claimed, dict[str, Column]] | None:  # fmt: skip
        """Lease samples of a task, by ids or up to `count` in the task's order, and read fields of them."""
        return self.claimed(
            lambda s: m.Claim(
                id=new_id(), session=self.session, partition=partition, task=task, ids=list(ids), count=count,
                fields=list(fields), wait_s=s,
            ),
            wait_s,
        )  # fmt: skip

    def complete(self, partition: str, lease: int, columns: Mapping[str, Column] | None = None) -> None:
        """Put a lease's result and finish the lease, in one request."""
        heads, buffers = pack_columns(dict(columns or {}))
        request = m.Complete(id=new_id(), session=self.session, partition=partition, lease=lease, columns=heads)
        self.ask(request, m.Ok, buffers)

    def ack(self, partition: str, task: str, ids: Sequence[int]) -> None:
        """A task has done these leased samples."""
        self.ask(m.Ack(id=new_id(), session=self.session, partition=partition, task=task, ids=list(ids)), m.Ok)

    def nack(self, partition: str, lease: int, ids: Sequence[int], reason: str) -> None:
        """These samples of a lease could not be done."""
        request = m.Nack(
            id=new_id(), session=self.session, partition=partition, lease=lease, ids=list(ids), reason=reason[:4096]
        )
        self.ask(request, m.Ok)

    def stream(
        self, partition: str, task: str, *, count: int, fields: Sequence[str] = (), wait_s: float | None = None,
        prefetch: int = 0,
    ) -> Stream[dict[str, Column]]:  # fmt: skip
        """A task's samples, up to `count` at a time, until the task is exhausted.

        What the loop has gone through is acknowledged, unless it was completed or refused; what it leaves unfinished is
        given back.

        Args:
            partition: Where the samples are.
            task: The consumer.
            count: Samples per delivery, at most.
            fields: Columns to read along.
            wait_s: How long to wait for each delivery; None waits for ever.
            prefetch: Deliveries that a thread claims ahead.

        Raises:
            TimeoutError: From the loop, if nothing came in `wait_s`.
        """
        return Stream(
            self, partition, task, count=count, fields=fields, wait_s=wait_s, prefetch=prefetch,
            make=lambda _ids, columns: columns,
        )  # fmt: skip

    # Looking

    def stats(self) -> dict[str, Any]:
        """Everything the queue counts."""
        reply, _ = self.ask(m.Stats(id=new_id(), session=self.session), m.StatsReply)
        document: dict[str, Any] = json.loads(reply.document)
        return document

    def peek(self, partition: str, sample: int) -> m.Peeked:
        """What the queue knows of one sample."""
        return self.ask(m.Peek(id=new_id(), session=self.session, partition=partition, sample=sample), m.Peeked)[0]

    def list_samples(
        self, partition: str, state: str, *, task: str = "", after: int = -1, limit: int = 1024
    ) -> m.Listed:
        """Ids in a state of a task, or `dead` or `skipped` ones."""
        request = m.ListSamples(
            id=new_id(), session=self.session, partition=partition, task=task, state=state, after=after, limit=limit
        )
        return self.ask(request, m.Listed)[0]

    # What all calls share

    def ask(self, request: m.Request, kind: type[R], buffers: Sequence[Buffer] = ()) -> tuple[R, list[Buffer]]:
        """One call that is answered at once; its reply must be of this kind."""
        reply, frames = self._send(request, buffers, 0.0)
        return self._expect(reply, kind), frames

    def wait(self, ask: Callable[[float], m.Request], kind: type[R], wait_s: float) -> tuple[R, list[Buffer]] | None:
        """Ask in slices, so that a lost connection is noticed, until something comes or `wait_s` has passed."""
        left = wait_s
        while True:
            slice_s = min(left, POLL_S)
            reply, frames = self._send(ask(slice_s), (), slice_s)
            if not isinstance(reply, m.Empty):
                return self._expect(reply, kind), frames
            left -= slice_s
            if left <= 0:
                return None

    def claimed(self, ask: Callable[[float], m.Request], wait_s: float) -> tuple[m.Claimed, dict[str, Column]] | None:
        """A call that waits for a lease, and the columns that come with it."""
        found = self.wait(ask, m.Claimed, wait_s)
        return (found[0], unpack_columns(found[0].columns, found[1])) if found else None

    def _send(self, request: m.Request, buffers: Sequence[Buffer], wait_s: float) -> tuple[m.AnyReply, list[Buffer]]:
        if isinstance(request, m.SessionRequest) and not request.session:
            raise StaleSessionError("this client has no session: say hello first")
        return self.exchange(request, buffers, wait_s)

    @staticmethod
    def _expect(reply: m.AnyReply, kind: type[R]) -> R:
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


class AlreadyDone(Exception):  # noqa: N818 - a signal to the caller's loop, not a failure
    """What was asked for has been done before: go on with the next."""
