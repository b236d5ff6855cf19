"""Waiting requests, indexed by what they wait for, so that a change retries only those it may concern.

A change marks keys as due; `run` retries their requests for a bounded time, so that however many requests wait, other
clients' messages and the signal to stop are served in between. A request that names ids waits for the first of them
that it lacks.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from xtoken_core.queue.budget import cost_of_request
from xtoken_core.queue.engine import Engine
from xtoken_core.queue.partition import Partition
from xtoken_core.queue.run.names import TRAIN, teacher_task
from xtoken_core.queue.run.partition import RunPartition
from xtoken_core.queue.sample import Status
from xtoken_core.wire import QueueError
from xtoken_core.wire import messages as m
from xtoken_core.wire.bounds import MAX_WAITING, MAX_WAITING_OF_SESSION

EXPIRED_AT_ONCE = 256
SPARE_DEADLINES = 1024
"""Deadlines of requests that wait no more which are kept beyond twice those that wait."""

Key = tuple[str, str, str]
"""Kind, partition and task: `hello` and `room` have neither, `task` has both, `ids` and `partition` a partition."""
Name = tuple[str, str]
"""Session and request id, which a repetition shares."""
KeyT = TypeVar("KeyT", bound=Hashable)
HELLO: Key = ("hello", "", "")
ROOM: Key = ("room", "", "")
IN_TURN = ("task", "room")
"""Kinds of which the requests compete for one thing: the first one that still waits ends the round."""
SOFT = (m.Put, m.Complete, m.Ack, m.Claim, m.ClaimSlot, m.ClaimBatch, m.LeaseBlock, m.Release, m.OpenedRing)
"""Requests after which one that waits for an id waits on, unless that very id is there now."""


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request that waits, its peer, and its deadline (monotonic clock).

    Attributes:
        key: What it waits for.
        missing: The first id that it lacks; None if it waits for something else.
        cost: Bytes that the budget is charged for it.
    """

    peer: bytes
    request: m.AnyRequest
    deadline: float
    since: float
    key: Key = HELLO
    missing: int | None = None
    cost: int = 0
    number: int = -1

    @property
    def session(self) -> str:
        """Return the session it belongs to; a hello has none."""
        return getattr(self.request, "session", "")

    @property
    def owner(self) -> str:
        """Return what its cost counts for: its session, or the peer of a hello."""
        return self.session or self.peer.hex()

    @property
    def name(self) -> Name:
        """Return session and request id."""
        return self.session, self.request.id


@dataclass(slots=True)
class _Round:
    """Retry of all requests of a key.

    Attributes:
        entries: Those that are left.
        hard: They are retried even if the id that they wait for is not there.
        again: Something has changed since the round began: another one follows.
    """

    entries: deque[WaitingRequest]
    hard: bool
    again: bool = False


@dataclass
class Waiting:
    """All waiting requests.

    Attributes:
        engine: State of the queue.
        answer: Callback that tries a request again; False if it still has to wait.
    """

    engine: Engine
    answer: Callable[[WaitingRequest], bool]
    _by_number: dict[int, WaitingRequest] = field(default_factory=dict)
    _by_name: dict[Name, WaitingRequest] = field(default_factory=dict)
    _by_key: dict[Key, dict[int, WaitingRequest]] = field(default_factory=dict)
    _by_id: dict[str, dict[int, dict[int, WaitingRequest]]] = field(default_factory=dict)
    _of_owner: dict[str, dict[int, WaitingRequest]] = field(default_factory=dict)
    _costs: dict[str, int] = field(default_factory=dict)
    _deadlines: list[tuple[float, int]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _due: dict[Key, _Round] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def is_due(self) -> bool:
        """Return whether requests are left to be retried."""
        return bool(self._due)

    def add(self, entry: WaitingRequest) -> list[WaitingRequest]:
        """Add a waiting request; a repeated request replaces the earlier copy.

        Returns:
            Requests that wait no more because the budget is used up: the newest of the session with the most bytes.

        Raises:
            QueueError: `too_large` if too many requests are waiting.
        """
        # Before the limits are checked: a repetition takes no more room than its first copy.
        old = self._by_name.get(entry.name)
        if old is not None:
            self._remove(old)
        if len(self) >= MAX_WAITING or len(self._of_owner.get(entry.owner, ())) >= MAX_WAITING_OF_SESSION:
            raise QueueError(
                "too_large", f"{MAX_WAITING_OF_SESSION} requests of a session may wait, {MAX_WAITING} in all"
            )
        entry.number, entry.cost = next(self._numbers), cost_of_request(entry.request)
        self._by_number[entry.number] = self._by_name[entry.name] = entry
        self._of_owner.setdefault(entry.owner, {})[entry.number] = entry
        self._charge(entry, entry.cost)
        heapq.heappush(self._deadlines, (entry.deadline, entry.number))
        # Answered requests leave their deadlines in the heap; they are swept once they are the larger part.
        if len(self._deadlines) > 2 * len(self) + SPARE_DEADLINES:
            self._deadlines = [item for item in self._deadlines if item[1] in self._by_number]
            heapq.heapify(self._deadlines)
        self._index(entry)
        evicted = []
        while self.engine.budget.excess("waiting") > 0:
            heaviest = max(self._costs, key=self._costs.__getitem__)
            # The newest: requests that have waited longest are the nearest to an answer.
            evicted.append(next(reversed(self._of_owner[heaviest].values())))
            self._remove(evicted[-1])
        return evicted

    def discard(self, request: m.AnyRequest) -> None:
        """Remove the earlier copy of an answered request, which came on a connection that its sender has given up.

        Hellos of different workers may have the same id; a copy of one gets the session that it has opened.
        """
        session = getattr(request, "session", "")
        # By name, not by peer: the repetition came on another connection.
        copy = self._by_name.get((session, request.id)) if session else None
        if copy is not None:
            self._remove(copy)

    def expired(self, now: float) -> list[WaitingRequest]:
        """Remove and return requests whose time is over, `EXPIRED_AT_ONCE` at most."""
        out: list[WaitingRequest] = []
        while self._deadlines and self._deadlines[0][0] <= now and len(out) < EXPIRED_AT_ONCE:
            entry = self._by_number.get(heapq.heappop(self._deadlines)[1])
            if entry is not None:
                self._remove(entry)
                out.append(entry)
        return out

    def wake(self, request: m.AnyRequest) -> None:
        """Mark the requests as due that this one, just answered, may have made possible."""
        if not self._by_number:
            return
        if isinstance(request, m.OpenPartition):
            self._mark(HELLO)
        if not isinstance(request, m.PartitionRequest):
            return
        partition = request.partition
        part = self.engine.partitions.get(partition)
        if part is None:
            return
        for task in part.samples.tasks:
            self._mark(("task", partition, task))
        self._mark(("partition", partition, ""))
        if isinstance(request, m.Put):
            waited_for = self._by_id.get(partition, {})
            # Of a put only the requests for its very ids; thousands may wait for others.
            for sample_id in waited_for.keys() & request.ids if waited_for else ():
                for entry in list(waited_for[sample_id].values()):
                    self._mark(("ids", partition, ""), [entry])
        else:
            # An ack may drop a sample that a request names behind the one that it waits for.
            drops = isinstance(request, m.Ack) and any(i in part.samples.finished for i in request.ids)
            self._mark(("ids", partition, ""), hard=drops or not isinstance(request, SOFT))
        # Whatever changes a partition may have freed memory; those that wait for room are tried one by one.
        self._mark(ROOM)

    def wake_all(self) -> None:
        """Mark all requests as due, after the end of a session."""
        for key in self._by_key:
            self._mark(key, hard=True)

    def answer_ended_sessions(self) -> None:
        """Retry the requests of ended sessions, which are refused by it."""
        live = self.engine.sessions.live
        for entries in [list(entries.values()) for entries in self._of_owner.values()]:
            # Hellos have no session and wait on.
            if entries[0].session and entries[0].session not in live:
                for entry in entries:
                    self._try(entry)

    def run(self, seconds: float) -> None:
        """Retry requests that are due for some seconds, at least one of them."""
        deadline = time.monotonic() + seconds
        while self._due:
            # One request of the first round at a time, so that the deadline is looked at between any two.
            key, current = next(iter(self._due.items()))
            self._retry(key, current)
            if not current.entries:
                del self._due[key]
                if current.again:
                    self._mark(key, hard=current.hard)
            if time.monotonic() >= deadline:
                return

    def _retry(self, key: Key, current: _Round) -> None:
        """Retry one request of a round that may be possible now; a round in turn ends with one that is not."""
        while current.entries:
            entry = current.entries.popleft()
            if entry.number not in self._by_number:
                continue
            if not current.hard and self._still_lacks(entry):
                continue
            # The others want the same thing, and came later: they cannot be served either.
            if not self._try(entry) and key[0] in IN_TURN:
                current.entries.clear()
            return

    def _mark(self, key: Key, entries: list[WaitingRequest] | None = None, *, hard: bool = False) -> None:
        if key not in self._by_key:
            return
        current = self._due.get(key)
        # Appended to the round that runs; without a list a whole new round follows, since some have been tried.
        if entries is not None and current is not None:
            current.entries.extend(entries)
        elif current is not None:
            current.again, current.hard = True, current.hard or hard
        else:
            self._due[key] = _Round(deque(entries if entries is not None else self._by_key[key].values()), hard)

    def _still_lacks(self, entry: WaitingRequest) -> bool:
        """Return whether the id that a request waits for is still not there; no answer can be given then."""
        if entry.missing is None:
            return False
        assert isinstance(entry.request, m.PartitionRequest)
        part = self.engine.partitions[entry.request.partition]
        # It will never come: the request is answered by a refusal.
        if entry.missing in part.samples.finished or entry.missing in part.samples.dead:
            return False
        return _lacks(part, entry.request, entry.missing)

    def _try(self, entry: WaitingRequest) -> bool:
        if self.answer(entry):
            self._remove(entry)
            return True
        if entry.missing is not None:
            self._unindex(entry)
            self._index(entry)
        return False

    def _remove(self, entry: WaitingRequest) -> None:
        if self._by_number.pop(entry.number, None) is None:
            return
        self._unindex(entry)
        self._by_name.pop(entry.name, None)
        self._charge(entry, -entry.cost)
        mine = self._of_owner[entry.owner]
        del mine[entry.number]
        if not mine:
            del self._of_owner[entry.owner], self._costs[entry.owner]

    def _charge(self, entry: WaitingRequest, nbytes: int) -> None:
        self.engine.budget.add("waiting", nbytes)
        self._costs[entry.owner] = self._costs.get(entry.owner, 0) + nbytes

    def _index(self, entry: WaitingRequest) -> None:
        entry.key, entry.missing = self._key_of(entry.request)
        self._by_key.setdefault(entry.key, {})[entry.number] = entry
        if entry.missing is not None:
            self._by_id.setdefault(entry.key[1], {}).setdefault(entry.missing, {})[entry.number] = entry

    def _unindex(self, entry: WaitingRequest) -> None:
        _discard(self._by_key, entry.key, entry.number)
        if entry.missing is not None and entry.key[1] in self._by_id:
            ids = self._by_id[entry.key[1]]
            _discard(ids, entry.missing, entry.number)
            if not ids:
                del self._by_id[entry.key[1]]

    def _key_of(self, request: m.AnyRequest) -> tuple[Key, int | None]:
        match request:
            case m.Hello():
                return HELLO, None
            case m.Room():
                return ROOM, None
            case m.Claim() if request.count:
                return ("task", request.partition, request.task), None
            case m.PartitionRequest():
                part = self.engine.partitions[request.partition]
                missing = next((i for i in getattr(request, "ids", ()) if _lacks(part, request, i)), None)
                return ("partition" if missing is None else "ids", request.partition, ""), missing
        raise TypeError(f"a {type(request).__name__} never waits")


def _lacks(part: Partition, request: m.PartitionRequest, sample_id: int) -> bool:
    """Return whether a request has to wait for this id."""
    sample = part.samples.samples.get(sample_id)
    if isinstance(request, m.Get):
        return sample is None or not sample.fields.issuperset(request.fields)
    if sample is None or sample_id in part.samples.dead:
        return False  # it is refused, or answered without it
    return sample.status.get(_task_of(part, request)) in (Status.WAITING, Status.LEASED)


def _task_of(part: Partition, request: m.PartitionRequest) -> str:
    if isinstance(request, m.Claim):
        return request.task
    if isinstance(request, m.ClaimSlot) and isinstance(part, RunPartition):
        rings = [ring.teacher for ring in part.run.rings.by_pair.values() if ring.id == request.ring]
        return teacher_task(rings[0]) if rings else ""
    return TRAIN


def _discard(index: dict[KeyT, dict[int, WaitingRequest]], key: KeyT, number: int) -> None:
    """Remove an entry from an index."""
    entries = index.get(key)
    if entries is not None:
        entries.pop(number, None)
        if not entries:
            del index[key]
