"""Engine of the queue, without a socket: takes a request, returns a response, or None while the request has to wait.

The server drives this class, and so do tests without one; the clock is injected by the caller.

The last reply of each lane is kept, so that a repeated request gets the same reply and changes nothing. A request id is
`lane.number`, or just a lane. A client has one request open per lane, with rising numbers: a new one means that the
reply to the previous one has arrived, and that reply is dropped. A lower one is a late copy.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from xtoken_core.queue.budget import (
    ENTRY_BYTES,
    RESULTS_FACTOR,
    SESSION_BYTES,
    SLOT_BYTES,
    Budget,
    cost_of_definition,
    cost_of_put,
    cost_of_reasons,
    cost_of_reply,
)
from xtoken_core.queue.partition import Partition, PriorLease
from xtoken_core.queue.response import Response
from xtoken_core.queue.run.partition import RunPartition
from xtoken_core.queue.sessions import Session, Sessions
from xtoken_core.queue.stats import stats_document
from xtoken_core.wire import QueueError, unpack_columns
from xtoken_core.wire import messages as m
from xtoken_core.wire.bounds import MAX_AHEAD_S, MAX_DOCUMENT_BYTES, MAX_LANES, MAX_PARTITIONS, MAX_SESSIONS
from xtoken_core.wire.columns import Buffer

ENDED_AT_ONCE = 64
"""Silent sessions that one tick ends at most, so that no tick takes long."""
SPARE_PART = 16
"""A client that waits for room gets it once a sixteenth of the account of samples is free."""
NO_LEASE = PriorLease()
NBYTES_OF = attrgetter("store.nbytes")


class Engine:
    """All partitions and sessions of one queue.

    Args:
        memory_limit: Bytes of all samples and their bookkeeping, at most.
        clock: Returns seconds.
        opens: Returns the partition that a message opens.

    Attributes:
        changes: Number of requests so far that may let a waiting one proceed.
        on_change: Callback with every change before it is answered, for the write-ahead log.
        waiting: Callback for the number of requests that wait for a change.
    """

    def __init__(
        self,
        *,
        memory_limit: int,
        clock: Callable[[], float],
        opens: Callable[[m.OpenPartition, Sessions], Partition] | None = None,
    ) -> None:
        self.memory_limit = memory_limit
        self.opens = opens or run_partition
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

        The last request of a lane (see `xtoken_core.queue.engine`) gets the same reply again and changes nothing.

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
        # A request that was only kept waiting says nothing about its worker, which may be gone since.
        if not waited:
            session.last_seen = self.clock()
        # Before anything else: a repeated request must change nothing, whatever the state is by now.
        cached = self._replies.get(session.id, request.id)
        if cached is not None:
            return self._repeated(request, cached)
        # Read before the call: finishing a lease forgets which samples it had, and the log needs them.
        prior = NO_LEASE if self.on_change is None else self._prior_lease(request)
        kind = type(request)
        call = CALLS.get(kind)
        if call is not None:
            response = call(self, request, session, buffers)
        else:
            assert isinstance(request, m.PartitionRequest)
            response = self._partition(request.partition).handle(request)
        if response is None:
            return None
        tag = m.TAGS[kind]
        self.counts[tag] = self.counts.get(tag, 0) + 1
        # Reads are neither logged nor cached: repeating one is harmless.
        if kind not in READS:
            self._record_change(request, response, session, buffers, prior)
        return response

    def answer_empty(self, request: m.AnyRequest) -> m.Empty:
        """Return the answer to a request that has waited in vain, and keep it: a copy that comes late must not run."""
        session, reply = getattr(request, "session", ""), m.Empty(id=request.id)
        if session in self.sessions.live and type(request) not in READS | NATURALLY_IDEMPOTENT:
            self._replies.put(session, request.id, Response(reply))
        return reply

    def tick(self) -> None:
        """End the sessions that have been silent for too long."""
        for session in self.sessions.silent(self.clock())[:ENDED_AT_ONCE]:
            self.sessions.end(session.id, f"no sign of life for {session.silence:g} s")
            self.changes += 1
            self._drop_stale()
        if self.changes != self._charged_at:
            self.charge_partitions()
            self._charged_at = self.changes
        # Ages of finished leases are dropped in bulk, not at each ack: amortised over as many leases again.
        if len(self.leased_at) > 2 * sum(len(part.lease_ids()) for part in self.partitions.values()):
            live = {(name, lease) for name, part in self.partitions.items() for lease in part.lease_ids()}
            self.leased_at = {key: since for key, since in self.leased_at.items() if key in live}

    def _record_change(
        self, request: m.AnyRequest, response: Response, session: Session, buffers: Sequence[Buffer], prior: PriorLease
    ) -> None:
        """Log and cache an answered request that has changed something."""
        self.changes += 1
        if isinstance(request, m.PartitionRequest):
            self.partitions[request.partition].drop_stale()
        else:
            self._drop_stale()
        # Before the reply leaves: what a client has been answered must survive a crash.
        if self.on_change is not None:
            self.on_change(request, buffers, prior)
        if type(response.reply) in LEASING:
            self._note_lease(request, response)
        if type(request) not in NATURALLY_IDEMPOTENT and not session.ended:
            self._replies.put(session.id, request.id, response)

    def _drop_stale(self) -> None:
        for part in self.partitions.values():
            part.drop_stale()

    def _prior_lease(self, request: m.AnyRequest) -> PriorLease:
        part = self.partitions.get(getattr(request, "partition", ""))
        if part is None or not isinstance(request, (m.Ack, m.Complete, m.Nack)):
            return NO_LEASE
        return part.prior_lease(request)

    def _note_lease(self, request: m.AnyRequest, response: Response) -> None:
        """Record when a lease was given, for its age in the statistics."""
        reply = response.reply
        if isinstance(reply, LEASING) and isinstance(request, m.PartitionRequest) and reply.lease:
            self.leased_at.setdefault((request.partition, reply.lease), self.clock())

    def _bye(self, _request: m.Bye, session: Session, _buffers: Sequence[Buffer]) -> Response:
        self.sessions.end(session.id, "bye")
        return Response(m.Ok())

    def _stats(self, _request: m.Stats, _session: Session, _buffers: Sequence[Buffer]) -> Response:
        document = stats_document(self)
        if len(document) > MAX_DOCUMENT_BYTES:
            raise QueueError(
                "too_large", f"the statistics have {len(document)} bytes; a reply may have {MAX_DOCUMENT_BYTES}"
            )
        return Response(m.StatsReply(document=document))

    def _put(self, request: m.Put, _session: Session, buffers: Sequence[Buffer]) -> Response:
        part = self._partition(request.partition)
        rows = len(request.ids)
        cost = cost_of_put(rows, len(request.columns), part.ordered_tasks)
        if request.tombstones:
            cost += cost_of_reasons(len(request.tombstones), sum(map(len, set(request.tombstones.values()))))
        self._require(part, cost, "a put", 1.0 if request.lease is None else RESULTS_FACTOR, rows)
        return part.put(request, unpack_columns(request.columns, buffers), self.memory_limit - self.nbytes)

    def _complete(self, request: m.Complete, _session: Session, buffers: Sequence[Buffer]) -> Response:
        part = self._partition(request.partition)
        if request.columns:
            rows = request.columns[0].rows
            cost = cost_of_put(0, len(request.columns), 0) + rows * ENTRY_BYTES
            self._require(part, cost, "a result", RESULTS_FACTOR, rows)
        # Results have room of their own, or inputs could lock them out.
        room = 2 * self.memory_limit - self.nbytes
        return part.complete(request, unpack_columns(request.columns, buffers), room)

    def _rewind(self, request: m.Rewind, _session: Session, _buffers: Sequence[Buffer]) -> Response | None:
        part = self._partition(request.partition)
        count, texts = len(request.skipped) + len(request.dead), {*request.skipped.values(), *request.dead.values()}
        self._require(part, cost_of_reasons(count, sum(map(len, texts))), "a rewind", RESULTS_FACTOR, count)
        return part.handle(request)

    def _announce_ring(self, request: m.AnnounceRing, _session: Session, _buffers: Sequence[Buffer]) -> Response | None:
        part = self._partition(request.partition)
        slots = part.definition.run.slots if part.definition.run is not None else 0
        self._require(part, slots * SLOT_BYTES, "a ring", RESULTS_FACTOR, slots)
        return part.handle(request)

    def _require(self, part: Partition, cost: int, what: str, factor: float, rows: int) -> None:
        """Charge a partition for what a request adds at most.

        Raises:
            QueueError: `no_room`.
        """
        # The estimate is an upper bound; the exact sum costs a pass over partitions and is made only when it matters.
        if self.budget.excess("samples", cost) > 0:
            self.charge_partitions()
            self.budget.require("samples", cost, f"{what} of {rows}", factor=factor)
        self.budget.add("samples", cost)
        part.charged += cost

    def _room(self, request: m.Room, _session: Session, _buffers: Sequence[Buffer]) -> Response | None:
        self._partition(request.partition)
        if request.bytes > self.memory_limit:
            raise QueueError("too_large", f"{request.bytes} bytes exceed the limit of {self.memory_limit}")
        # Not the first free byte: clients would be woken one by one for puts that do not fit.
        spare = self.budget.limits["samples"] // SPARE_PART
        if self.budget.excess("samples", spare) > 0:
            self.charge_partitions()
        room = self.memory_limit - self.nbytes if self.budget.excess("samples", spare) <= 0 else -1
        return Response(m.Stored(room=room)) if room >= request.bytes else None

    def _hello(self, request: m.Hello) -> Response | None:
        if m.VERSION not in request.versions:
            raise QueueError("unsupported_version", f"this queue speaks version {m.VERSION}, not {request.versions}")
        run = next((p for p in self.partitions.values() if isinstance(p, RunPartition)), None)
        if request.needs_run and run is None:
            return None
        # A hello whose reply was lost is repeated with its id: a second session would end the first.
        session = self._opened_by(request) or self._new_session(request)
        welcome = m.Welcome(session=session.id, version=m.VERSION, memory_limit=self.memory_limit)
        if run is not None:
            welcome.partition, welcome.run = run.name, run.run.definition.document
        return Response(welcome)

    def _opened_by(self, request: m.Hello) -> Session | None:
        """Return the session that this very hello has opened before."""
        for session in self.sessions.live.values():
            if session.name == request.name and self._hellos.get(session.id) == request.id:
                return session
        return None

    def _new_session(self, request: m.Hello) -> Session:
        if len(self.sessions.live) >= MAX_SESSIONS:
            raise QueueError("too_large", f"a queue holds at most {MAX_SESSIONS} sessions")
        ahead = request.incarnation - time.time_ns()
        if ahead > MAX_AHEAD_S * 1e9:  # it would lock out every later start of the worker
            raise QueueError("bad_request", f"incarnation {request.incarnation} lies {ahead / 1e9:.0f} s in the future")
        self.budget.require("sessions", SESSION_BYTES, "a session")
        now = self.clock()
        session = Session(
            id=secrets.token_hex(16),
            name=request.name,
            role=request.role,
            incarnation=request.incarnation,
            rank=request.rank,
            silence=request.silence_s,
            last_seen=now,
            progress_at=now,
        )
        if self.sessions.open(session):
            self._drop_stale()
        self.budget.add("sessions", SESSION_BYTES)
        self._hellos[session.id] = request.id
        self.changes += 1
        return session

    def _heartbeat(self, request: m.Heartbeat, session: Session, _buffers: Sequence[Buffer]) -> Response:
        session.phase, session.activity = request.phase, request.activity
        # A heartbeat proves a living thread, not a working one: only changed progress moves this clock.
        if request.progress != session.progress:
            session.progress, session.progress_at = request.progress, self.clock()
        return Response(m.Ok())

    def _open(self, request: m.OpenPartition, _session: Session, _buffers: Sequence[Buffer]) -> Response:
        known = self.partitions.get(request.partition)
        if known is not None and not known.same_as(request):
            raise QueueError("conflict", f"partition {request.partition!r} is open with another definition")
        if known is None:
            if len(self.partitions) >= MAX_PARTITIONS:
                raise QueueError("too_large", f"a queue holds at most {MAX_PARTITIONS} partitions")
            cost = cost_of_definition(request)
            self.budget.require("partitions", cost, f"partition {request.partition!r}")
            self.partitions[request.partition] = self.opens(request, self.sessions)
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
            # Replies are kept without their columns, which may be large and are in the store anyway.
            columns = self._partition(request.partition).store.read(cached.reply.ids, request.fields)
            return Response(cached.reply, columns)
        return cached

    def _session_ended(self, session: str) -> None:
        if session in self._hellos:
            self.budget.add("sessions", -SESSION_BYTES)
        self._replies.drop(session)
        self._hellos.pop(session, None)


def run_partition(definition: m.OpenPartition, sessions: Sessions) -> Partition:
    """Return the partition of a run that a message opens.

    Raises:
        QueueError: It opens one with tasks of its own, for which a queue has to be started by hand.
    """
    if definition.run is None:
        raise QueueError("bad_request", "this is the queue of a run: start one for other tasks by `xtoken queue`")
    return RunPartition(definition, sessions)


READS: frozenset[type[m.Request]] = frozenset(
    {
        m.Heartbeat,
        m.Get,
        m.Room,
        m.ListSamples,
        m.Peek,
        m.Stats,
        m.Window,
        m.AwaitTrainer,
        m.AwaitRing,
        m.AwaitOpened,
        m.CheckStep,
    }
)


"""Requests that change nothing."""


LEASING = (m.Claimed, m.Block)


"""Replies that may name a lease."""


CALLS: dict[type[m.Request], Callable[[Engine, Any, Session, Sequence[Buffer]], Response | None]] = {
    m.Heartbeat: Engine._heartbeat,
    m.Bye: Engine._bye,
    m.OpenPartition: Engine._open,
    m.Stats: Engine._stats,
    m.Put: Engine._put,
    m.Complete: Engine._complete,
    m.Room: Engine._room,
    m.Rewind: Engine._rewind,
    m.AnnounceRing: Engine._announce_ring,
}


"""Requests that the engine answers or charges itself; all others go straight to their partition."""


NATURALLY_IDEMPOTENT: frozenset[type[m.Request]] = frozenset({m.ClaimSlot, m.ClaimBatch})


"""Requests whose repetition returns what the first one made, so that their replies need no cache."""


def lane_of(request: str) -> str:
    """Return the lane of a request id: everything before its last dot, or all of it."""
    lane, dot, _ = request.rpartition(".")
    return lane if dot else request


class ReplyCache:
    """Last reply per session and lane, limited to each session's most recent lanes.

    All replies together are limited by the budget: beyond it, the session that holds most loses its oldest ones.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._lanes: defaultdict[str, OrderedDict[str, tuple[str, Response, int]]] = defaultdict(OrderedDict)
        self._bytes: dict[str, int] = {}

    def get(self, session: str, request: str) -> Response | None:
        """Return the reply to exactly this request, if it is still the last one of its lane.

        Raises:
            QueueError: `bad_request` if a later request of the lane was answered.
        """
        last, reply, _ = self._lanes[session].get(lane_of(request)) or ("", None, 0)
        # By length, then as text: ids of a lane differ in their number only, which has no leading zeros.
        if (len(request), request) < (len(last), last):
            raise QueueError("bad_request", f"{request} comes after {last} was answered: a lane's numbers must rise")
        return reply if last == request else None

    def put(self, session: str, request: str, response: Response) -> None:
        """Replace the lane's reply; columns are not kept."""
        lanes, lane, cost = self._lanes[session], lane_of(request), cost_of_reply(response.reply)
        old = lanes.pop(lane, None)
        # Without columns: they are read again for a repeated claim, and a put's reply has none.
        lanes[lane] = (request, Response(response.reply), cost)
        if old is not None and old[2] == cost:
            return
        self._charge(session, cost - (0 if old is None else old[2]))
        if len(lanes) > MAX_LANES:
            self._drop_oldest(session)
        while self._budget.excess("replies") > 0:
            # Half of the largest holder's replies at once, so that one flooding client pays and the loop stays short.
            heaviest = max(self._bytes, key=self._bytes.__getitem__)
            enough = self._bytes[heaviest] // 2
            while self._bytes.get(heaviest, 0) > enough:
                self._drop_oldest(heaviest)

    def drop(self, session: str) -> None:
        """Drop all replies of an ended session."""
        self._lanes.pop(session, None)
        self._budget.add("replies", -self._bytes.pop(session, 0))

    def _drop_oldest(self, session: str) -> None:
        _, (_, _, cost) = self._lanes[session].popitem(last=False)
        self._charge(session, -cost)

    def _charge(self, session: str, nbytes: int) -> None:
        self._budget.add("replies", nbytes)
        self._bytes[session] = self._bytes.get(session, 0) + nbytes
