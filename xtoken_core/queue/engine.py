"""Engine of the queue, without a socket: takes a request, returns a response, or None while the request has to wait.

The server and the in-memory transport both drive this class; the clock is injected by the caller.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from operator import attrgetter

from xtoken_core.queue.budget import (
    ENTRY_BYTES,
    RESULTS_FACTOR,
    SESSION_BYTES,
    SLOT_BYTES,
    Budget,
    cost_of_definition,
    cost_of_put,
    cost_of_reasons,
)
from xtoken_core.queue.partition import Partition, PriorLease
from xtoken_core.queue.reply_cache import ReplyCache
from xtoken_core.queue.response import Response
from xtoken_core.queue.run.partition import RunPartition
from xtoken_core.queue.sessions import Session, Sessions
from xtoken_core.queue.stats import stats_document
from xtoken_core.queue.tasks.partition import TaskPartition
from xtoken_core.wire import QueueError, unpack_columns
from xtoken_core.wire import messages as m
from xtoken_core.wire.bounds import MAX_AHEAD_S, MAX_PARTITIONS, MAX_SESSIONS
from xtoken_core.wire.columns import Buffer

ENDED_AT_ONCE = 64
"""Silent sessions that one tick ends at most, so that no tick takes long."""
SPARE_PART = 16
"""A client that waits for room gets it once a sixteenth of the account of samples is free."""
NBYTES_OF = attrgetter("store.nbytes")


class Engine:
    """All partitions and sessions of one queue.

    Attributes:
        changes: Number of requests so far that may let a waiting one proceed.
        on_change: Callback with every change before it is answered, for the write-ahead log.
        waiting: Callback for the number of requests that wait for a change.
    """

    def __init__(self, *, memory_limit: int, clock: Callable[[], float]) -> None:
        self.memory_limit = memory_limit
        self.budget = Budget(memory_limit)
        self.clock = clock
        self.sessions = Sessions()
        self.partitions: dict[str, Partition] = {}
        self.changes = 0
        self.started = clock()
        self.counts: dict[str, int] = {}
        self.on_change: Callable[[m.Request, Sequence[Buffer], PriorLease], None] | None = None
        self.waiting: Callable[[], int] = lambda: 0
        self.leased_at: dict[tuple[str, int], float] = {}
        self._replies = ReplyCache(self.budget)
        self._hellos: dict[str, str] = {}
        self._charged_at = 0
        self.sessions.on_end.append(self._session_ended)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all buffers held."""
        return sum(map(NBYTES_OF, self.partitions.values()))

    def charge_partitions(self) -> None:
        """Bring the budget's account of samples up to date; in between it holds estimates that are not too low."""
        for part in self.partitions.values():
            part.samples.prune_statuses()
            overhead = part.overhead
            self.budget.add("samples", overhead - part.charged)
            part.charged = overhead

    def handle(self, request: m.AnyRequest, buffers: Sequence[Buffer], *, waited: bool = False) -> Response | None:
        """Answer a request; None if it has to wait for a change.

        The last request of a lane (see `xtoken_core.queue.reply_cache`) gets the same reply again and changes nothing.

        Args:
            request: The request.
            buffers: Buffers of its columns.
            waited: The request is tried again after it has waited, so it is no sign of life of its session.

        Raises:
            QueueError: The request is refused.
        """
        if isinstance(request, m.Hello):
            return self._hello(request)
        session = self.sessions.get(request.session)
        if not waited:
            session.last_seen = self.clock()
        cached = self._replies.get(session.id, request.id)
        if cached is not None:
            return self._repeated(request, cached)
        prior = PriorLease() if self.on_change is None else self._prior_lease(request)
        response = self._dispatch(request, session, buffers)
        if response is not None:
            self._record(request, response, session, buffers, prior)
        return response

    def tick(self) -> None:
        """End the sessions that have been silent for too long."""
        for session in self.sessions.silent(self.clock())[:ENDED_AT_ONCE]:
            self.sessions.end(session.id, f"no sign of life for {session.silence:g} s")
            self.changes += 1
            self._drop_stale()
        if self.changes != self._charged_at:
            self.charge_partitions()
            self._charged_at = self.changes
        if len(self.leased_at) > 2 * sum(len(part.lease_ids()) for part in self.partitions.values()):
            live = {(name, lease) for name, part in self.partitions.items() for lease in part.lease_ids()}
            self.leased_at = {key: since for key, since in self.leased_at.items() if key in live}

    def _record(
        self, request: m.AnyRequest, response: Response, session: Session, buffers: Sequence[Buffer], prior: PriorLease
    ) -> None:
        """Count an answered request; log and cache it if it has changed something."""
        kind = type(request)
        tag = str(kind.__struct_config__.tag)
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if kind in READS:
            return
        self.changes += 1
        self._drop_stale()
        if self.on_change is not None:
            self.on_change(request, buffers, prior)
        self._note_lease(request, response)
        if kind not in NATURALLY_IDEMPOTENT and not session.ended:
            self._replies.put(session.id, request.id, response)

    def _drop_stale(self) -> None:
        for part in self.partitions.values():
            if isinstance(part, RunPartition):
                part.drop_stale()

    def _prior_lease(self, request: m.AnyRequest) -> PriorLease:
        part = self.partitions.get(getattr(request, "partition", ""))
        if part is None or not isinstance(request, (m.Ack, m.Complete, m.Nack)):
            return PriorLease()
        return part.prior_lease(request)

    def _note_lease(self, request: m.AnyRequest, response: Response) -> None:
        """Record when a lease was given, for its age in the statistics."""
        reply = response.reply
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
                self._require_put(part, request)
                return part.put(request, unpack_columns(request.columns, buffers), self.memory_limit - self.nbytes)
            case m.Complete():
                if request.columns:
                    cost = cost_of_put(0, len(request.columns), 0) + request.columns[0].rows * ENTRY_BYTES
                    self._require(part, cost, "a result", RESULTS_FACTOR)
                # Results have room of their own, or inputs could lock them out.
                room = 2 * self.memory_limit - self.nbytes
                return part.complete(request, unpack_columns(request.columns, buffers), room)
            case m.Room():
                return self._room(request)
            case m.Rewind():
                texts = {*request.skipped.values(), *request.dead.values()}
                cost = cost_of_reasons(len(request.skipped) + len(request.dead), sum(map(len, texts)))
                self._require(part, cost, "a rewind", RESULTS_FACTOR)
            case m.AnnounceRing():
                slots = part.definition.run.slots if part.definition.run is not None else 0
                self._require(part, slots * SLOT_BYTES, "a ring", RESULTS_FACTOR)
        return part.handle(request)

    def _require_put(self, part: Partition, request: m.Put) -> None:
        cost = cost_of_put(len(request.ids), len(request.columns), part.ordered_tasks)
        if request.tombstones:
            cost += cost_of_reasons(len(request.tombstones), sum(map(len, set(request.tombstones.values()))))
        what = f"a put of {len(request.ids)} samples"
        self._require(part, cost, what, 1.0 if request.lease is None else RESULTS_FACTOR)

    def _require(self, part: Partition, cost: int, what: str, factor: float) -> None:
        """Charge a partition for what a request adds at most.

        Raises:
            QueueError: `no_room`.
        """
        if self.budget.excess("samples", cost) > 0:
            self.charge_partitions()
            self.budget.require("samples", cost, what, factor=factor)
        self.budget.add("samples", cost)
        part.charged += cost

    def _room(self, request: m.Room) -> Response | None:
        if request.bytes > self.memory_limit:
            raise QueueError("too_large", f"{request.bytes} bytes exceed the limit of {self.memory_limit}")
        spare = self.budget.limits["samples"] // SPARE_PART
        if self.budget.excess("samples", spare) > 0:
            self.charge_partitions()
        room = self.memory_limit - self.nbytes if self.budget.excess("samples", spare) <= 0 else -1
        return Response(m.Stored(room=room)) if room >= request.bytes else None

    def _hello(self, request: m.Hello) -> Response | None:
        version = max(set(m.VERSIONS).intersection(request.versions), default=0)
        if not version:
            mine = ", ".join(map(str, m.VERSIONS))
            raise QueueError("unsupported_version", f"this queue speaks versions {mine}, the worker {request.versions}")
        run = next((p for p in self.partitions.values() if isinstance(p, RunPartition)), None)
        if request.needs_run and run is None:
            return None
        session = self._opened_by(request) or self._new_session(request, version)
        welcome = m.Welcome(session=session.id, version=session.version)
        if run is not None:
            welcome.partition, welcome.run = run.name, run.run.definition.document
        return Response(welcome)

    def _opened_by(self, request: m.Hello) -> Session | None:
        """Return the session that this very hello has opened before."""
        for session in self.sessions.live.values():
            if session.name == request.name and self._hellos.get(session.id) == request.id:
                return session
        return None

    def _new_session(self, request: m.Hello, version: int) -> Session:
        if len(self.sessions.live) >= MAX_SESSIONS:
            raise QueueError("too_large", f"a queue holds at most {MAX_SESSIONS} sessions")
        ahead = request.incarnation - time.time_ns()
        if ahead > MAX_AHEAD_S * 1e9:  # it would lock out every later start of the worker
            raise QueueError("bad_request", f"incarnation {request.incarnation} lies {ahead / 1e9:.0f} s in the future")
        self.budget.require("sessions", SESSION_BYTES, "a session")
        now = self.clock()
        session = Session(
            id=secrets.token_hex(16), name=request.name, role=request.role, incarnation=request.incarnation,
            rank=request.rank, silence=request.silence_s, last_seen=now, progress_at=now, version=version,
        )  # fmt: skip
        self.sessions.open(session)
        self.budget.add("sessions", SESSION_BYTES)
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
            cost = cost_of_definition(request)
            self.budget.require("partitions", cost, f"partition {request.partition!r}")
            self.partitions[request.partition] = new_partition(request, self.sessions)
            self.budget.add("partitions", cost)
        return Response(m.Ok())

    def _partition(self, name: str) -> Partition:
        part = self.partitions.get(name)
        if part is None:
            raise QueueError("unknown_partition", f"there is no partition {name!r} here")
        return part

    def _repeated(self, request: m.AnyRequest, cached: Response) -> Response:
        """Return a cached response again; the columns of a claim are read anew."""
        if isinstance(request, m.Claim) and isinstance(cached.reply, m.Claimed):
            columns = self._partition(request.partition).store.read(cached.reply.ids, request.fields)
            return Response(cached.reply, columns)
        return cached

    def _session_ended(self, session: str) -> None:
        if session in self._hellos:
            self.budget.add("sessions", -SESSION_BYTES)
        self._replies.drop(session)
        self._hellos.pop(session, None)


def new_partition(definition: m.OpenPartition, sessions: Sessions) -> Partition:
    """Return the partition that a message opens: that of a run, or a generic one."""
    return (TaskPartition if definition.run is None else RunPartition)(definition, sessions)


READS: frozenset[type[m.Request]] = frozenset(
    {
        m.Heartbeat, m.Get, m.Room, m.ListSamples, m.Peek, m.Stats, m.Window, m.AwaitTrainer, m.AwaitRing,
        m.AwaitOpened, m.CheckStep,
    }
)  # fmt: skip
"""Requests that change nothing."""

NATURALLY_IDEMPOTENT: frozenset[type[m.Request]] = frozenset({m.ClaimSlot, m.ClaimBatch})
"""Requests whose repetition returns what the first one made, so that their replies need no cache."""
