"""The queue itself, without a socket: a request goes in, an answer comes out, or None while it has to wait.

The server and the in-memory client both drive this class; time is whatever their clock says.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xtoken_core.queue.partition import Partition
from xtoken_core.queue.reply_cache import ReplyCache
from xtoken_core.queue.response import Response
from xtoken_core.queue.run import handlers as run_handlers
from xtoken_core.queue.sessions import Session, Sessions
from xtoken_core.queue.stats import stats_document
from xtoken_core.queue.tasks import handlers as task_handlers
from xtoken_core.wire import QueueError, unpack_columns
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import Buffer

MAX_PARTITIONS = 1024
MAX_SESSIONS = 16384


@dataclass(frozen=True, slots=True)
class Touched:
    """The lease that a request named, as it was before: its samples and task, or its block; of an ack, what it ends."""

    ids: tuple[int, ...] = ()
    task: str = ""
    block: int | None = None


class Engine:
    """All partitions and sessions of one queue.

    Attributes:
        changes: Grows with every request that may let a waiting one go on.
        journal: Told of every change before it is answered; None if there is none.
        waiting: Says how many requests wait for a change; whoever keeps them sets it.
    """

    def __init__(self, *, memory_limit: int, clock: Callable[[], float]) -> None:
        self.memory_limit = memory_limit
        self.clock = clock
        self.sessions = Sessions()
        self.partitions: dict[str, Partition] = {}
        self.changes = 0
        self.started = clock()
        self.counts: dict[str, int] = {}
        self.journal: Callable[[m.Request, Sequence[Buffer], Touched], None] | None = None
        self.waiting: Callable[[], int] = lambda: 0
        self.leased_at: dict[tuple[str, int], float] = {}
        self._replies = ReplyCache()
        self._hellos: dict[str, str] = {}
        self.sessions.on_end.append(self._forget)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers held."""
        return sum(part.store.nbytes for part in self.partitions.values())

    def handle(self, request: m.AnyRequest, buffers: Sequence[Buffer], *, waited: bool = False) -> Response | None:
        """Response a request, or None if it has to wait for a change.

        The last request of a lane (see `xtoken_core.queue.reply_cache`) gets the same answer again and changes nothing.
        One that is tried again after it has `waited` is no sign of life of its session.

        Raises:
            QueueError: The request is refused.
        """
        if isinstance(request, m.Hello):
            return self._hello(request)
        session = self.sessions.get(request.session)
        if not waited:
            session.last_seen = self.clock()
        known = self._replies.recall(session.id, request.id)
        if known is not None:
            return self._again(request, known)
        touched = Touched() if self.journal is None else self._touched(request)
        answer = self._dispatch(request, session, buffers)
        if answer is not None:
            kind = type(request)
            tag = str(kind.__struct_config__.tag)
            self.counts[tag] = self.counts.get(tag, 0) + 1
            if kind not in READS:
                self.changes += 1
                self._settle()
                if self.journal is not None:
                    self.journal(request, buffers, touched)
                self._note_lease(request, answer)
                if kind not in NATURAL:
                    self._replies.remember(session.id, request.id, answer)
        return answer

    def tick(self) -> None:
        """End the sessions that have been silent for too long."""
        for session in self.sessions.silent(self.clock()):
            self.sessions.end(session.id, f"no sign of life for {session.silence:g} s")
            self.changes += 1
            self._settle()
        if len(self.leased_at) > 2 * sum(len(part.lease_ids()) for part in self.partitions.values()):
            live = {(name, lease) for name, part in self.partitions.items() for lease in part.lease_ids()}
            self.leased_at = {key: since for key, since in self.leased_at.items() if key in live}

    def _settle(self) -> None:
        """After a change no columns are held of signals that are gone by it."""
        for part in self.partitions.values():
            if part.signals is not None:
                part.signals.settle()

    def _touched(self, request: m.AnyRequest) -> Touched:
        part = self.partitions.get(getattr(request, "partition", ""))
        if part is None or not isinstance(request, (m.Ack, m.Complete, m.Nack)):
            return Touched()
        if isinstance(request, m.Ack):
            known = request.task in part.samples.tasks
            mine = part.samples.held_by(request.session, request.task, request.ids) if known else ()
            return Touched(tuple(mine), request.task)
        if part.run is not None and request.lease in part.run.source.leases:
            return Touched(block=part.run.source.leases[request.lease].block)
        lease = part.samples.leases.get(request.lease)
        return Touched() if lease is None else Touched(lease.ids, lease.task)

    def _note_lease(self, request: m.AnyRequest, answer: Response) -> None:
        """When a lease was given, for its age."""
        reply = answer.reply
        if isinstance(reply, (m.Claimed, m.Block)) and isinstance(request, m.PartitionRequest) and reply.lease:
            self.leased_at.setdefault((request.partition, reply.lease), self.clock())

    def _dispatch(self, request: m.AnyRequest, session: Session, buffers: Sequence[Buffer]) -> Response | None:
        match request:
            case m.Heartbeat():
                return self._heartbeat(request, session)
            case m.Bye():
                self.sessions.end(session.id, "bye")
                return Response(m.Ok())
            case m.OpenPartition():
                return self._open(request)
            case m.Stats():
                return Response(m.StatsReply(document=stats_document(self)))
        assert isinstance(request, m.PartitionRequest)
        part = self._partition(request.partition)
        match request:
            case m.Put():
                columns = unpack_columns(request.columns, buffers)
                return task_handlers.put(part, request, columns, self.memory_limit - self.nbytes)
            case m.Complete():
                columns = unpack_columns(request.columns, buffers)
                if part.run is not None:
                    return run_handlers.complete(part, request, columns)
                return task_handlers.complete(part, request, columns, 2 * self.memory_limit - self.nbytes)
            case m.Room():
                room = self.memory_limit - self.nbytes
                if request.bytes > self.memory_limit:
                    raise QueueError("too_large", f"{request.bytes} bytes exceed the limit of {self.memory_limit}")
                return Response(m.Stored(room=room)) if room >= request.bytes else None
            case m.Seal():
                part.sealed = True
                return Response(m.Ok())
            case m.LeaseBlock():
                return run_handlers.lease_block(part, request, self.sessions)
            case m.AwaitRing():
                return run_handlers.await_ring(part, request, self.sessions)
        return CALLS[type(request)](part, request)

    def _hello(self, request: m.Hello) -> Response | None:
        if m.VERSION not in request.versions:
            raise QueueError(
                "unsupported_version", f"this queue speaks version {m.VERSION}, the worker {request.versions}"
            )
        run = next((p for p in self.partitions.values() if p.run is not None), None)
        if request.needs_run and run is None:
            return None
        session = self._opened_by(request) or self._new_session(request)
        welcome = m.Welcome(session=session.id, version=m.VERSION)
        if run is not None and run.definition.run is not None:
            welcome.partition, welcome.run = run.name, run.definition.run.document
        return Response(welcome)

    def _opened_by(self, request: m.Hello) -> Session | None:
        """The session that this very hello has opened before."""
        for session in self.sessions.live.values():
            if session.name == request.name and self._hellos.get(session.id) == request.id:
                return session
        return None

    def _new_session(self, request: m.Hello) -> Session:
        if len(self.sessions.live) >= MAX_SESSIONS:
            raise QueueError("too_large", f"a queue holds at most {MAX_SESSIONS} sessions")
        now = self.clock()
        session = Session(
            id=secrets.token_hex(16), name=request.name, role=request.role, incarnation=request.incarnation,
            rank=request.rank, silence=request.silence_s, last_seen=now, progress_at=now,
        )  # fmt: skip
        self.sessions.open(session)
        self._hellos[session.id] = request.id
        self.changes += 1
        return session

    def _heartbeat(self, request: m.Heartbeat, session: Session) -> Response:
        session.phase = request.phase
        if request.progress != session.progress:
            session.progress, session.progress_at = request.progress, self.clock()
        return Response(m.Ok())

    def _open(self, request: m.OpenPartition) -> Response:
        known = self.partitions.get(request.partition)
        if known is not None and not known.same_as(request):
            raise QueueError("conflict", f"partition {request.partition!r} is open with another definition")
        if known is None:
            if len(self.partitions) >= MAX_PARTITIONS:
                raise QueueError("too_large", f"a queue holds at most {MAX_PARTITIONS} partitions")
            self.partitions[request.partition] = Partition(request, self.sessions)
        return Response(m.Ok())

    def _partition(self, name: str) -> Partition:
        part = self.partitions.get(name)
        if part is None:
            raise QueueError("unknown_partition", f"there is no partition {name!r} here")
        return part

    def _again(self, request: m.AnyRequest, known: Response) -> Response:
        """An answer once more; the columns of a claim are read anew."""
        if isinstance(request, m.Claim) and isinstance(known.reply, m.Claimed):
            return Response(known.reply, self._partition(request.partition).store.read(known.reply.ids, request.fields))
        return known

    def _forget(self, session: str) -> None:
        self._replies.forget(session)
        self._hellos.pop(session, None)


READS: frozenset[type[m.Request]] = frozenset(
    {
        m.Heartbeat, m.Get, m.Room, m.ListSamples, m.Peek, m.Stats, m.Window, m.AwaitTrainer, m.AwaitRing,
        m.AwaitOpened, m.CheckStep,
    }
)  # fmt: skip

NATURAL: frozenset[type[m.Request]] = frozenset({m.ClaimSlot, m.ClaimBatch})
"""Calls whose repetition finds what they made before, so that their answers need not be kept."""

CALLS: dict[type[m.Request], Callable[[Partition, Any], Response | None]] = {
    m.Get: task_handlers.get,
    m.Claim: task_handlers.claim,
    m.Ack: task_handlers.ack,
    m.Nack: task_handlers.nack,
    m.Clear: task_handlers.clear,
    m.ListSamples: task_handlers.list_samples,
    m.Peek: task_handlers.peek,
    m.Window: run_handlers.window,
    m.AwaitTrainer: run_handlers.await_trainer,
    m.AnnounceRing: run_handlers.announce_ring,
    m.OpenedRing: run_handlers.opened_ring,
    m.AwaitOpened: run_handlers.await_opened,
    m.ClaimSlot: run_handlers.claim_slot,
    m.ClaimBatch: run_handlers.claim_batch,
    m.Release: run_handlers.release,
    m.CheckStep: run_handlers.check_step,
    m.AckWindow: run_handlers.ack_window,
    m.Rewind: run_handlers.rewind,
    m.Giveup: run_handlers.give_up,
}
