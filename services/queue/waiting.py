"""Waiting requests, indexed by what they wait for, so that a change retries only those it may concern."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from xtoken_core.queue.engine import Engine
from xtoken_core.wire import QueueError
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import Buffer

MAX_WAITING = 1 << 16
MAX_WAITING_OF_SESSION = 256
FEW_IDS = 64

Key = tuple[str, str, str | int]


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request that waits, its peer, and its deadline (monotonic clock)."""

    peer: bytes
    request: m.AnyRequest
    buffers: list[Buffer]
    deadline: float
    since: float
    key: Key = ("", "", "")
    removed: bool = False

    @property
    def session(self) -> str:
        """Return the session it belongs to; a hello has none."""
        return getattr(self.request, "session", "")

    @property
    def name(self) -> tuple[str, str]:
        """Return session and request id, which a repetition shares."""
        return self.session, self.request.id


@dataclass
class Waiting:
    """All waiting requests.

    Attributes:
        engine: State of the queue.
        answer: Callback that tries a request again; False if it still has to wait.
    """

    engine: Engine
    answer: Callable[[WaitingRequest], bool]
    _by_name: dict[tuple[str, str], WaitingRequest] = field(default_factory=dict)
    _by_key: dict[Key, dict[tuple[str, str], WaitingRequest]] = field(default_factory=dict)
    _of_session: dict[str, int] = field(default_factory=dict)
    _deadlines: list[tuple[float, int, WaitingRequest]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __len__(self) -> int:
        return len(self._by_name)

    def add(self, entry: WaitingRequest) -> None:
        """Add a waiting request; a repeated request replaces the earlier copy.

        Raises:
            QueueError: `too_large` if too many requests are waiting.
        """
        old = self._by_name.get(entry.name)
        if old is not None:
            self._remove(old)
        if len(self) >= MAX_WAITING or self._of_session.get(entry.session, 0) >= MAX_WAITING_OF_SESSION:
            raise QueueError(
                "too_large", f"{MAX_WAITING_OF_SESSION} requests of a session may wait, {MAX_WAITING} in all"
            )
        self._by_name[entry.name] = entry
        self._of_session[entry.session] = self._of_session.get(entry.session, 0) + 1
        heapq.heappush(self._deadlines, (entry.deadline, next(self._numbers), entry))
        self._index(entry)

    def expired(self, now: float) -> list[WaitingRequest]:
        """Remove and return the requests whose time is over."""
        out = []
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = heapq.heappop(self._deadlines)[2]
            if not entry.removed:
                self._remove(entry)
                out.append(entry)
        return out

    def wake(self, request: m.AnyRequest) -> None:
        """Retry the requests that this one, just answered, may have made possible."""
        if isinstance(request, m.OpenPartition):
            self._try_all(("hello", "", ""))
        if not isinstance(request, m.PartitionRequest):
            return
        partition = request.partition
        part = self.engine.partitions.get(partition)
        if part is None or not self._by_name:
            return
        for task in part.samples.tasks:
            self._try_in_turn(("task", partition, task))
        self._try_all(("partition", partition, ""))
        ids = request.ids if isinstance(request, m.Put) and len(request.ids) <= FEW_IDS else None
        self._try_gets(partition, ids)
        self._try_in_turn(("room", "", ""))

    def wake_all(self) -> None:
        """Retry all requests after the end of a session."""
        for key in list(self._by_key):
            if key[0] in ("task", "room"):
                self._try_in_turn(key)
            else:
                self._try_all(key)

    def answer_ended_sessions(self) -> None:
        """Retry the requests of ended sessions, which are refused by it."""
        for session in [s for s in self._of_session if s and s not in self.engine.sessions.live]:
            for entry in [e for e in self._by_name.values() if e.session == session]:
                self._try(entry)

    def _try_gets(self, partition: str, ids: list[int] | None) -> None:
        if ids is not None:
            for sample_id in ids:
                self._try_all(("get", partition, sample_id))
            return
        for key in [k for k in self._by_key if k[:2] == ("get", partition)]:
            self._try_all(key)

    def _try_in_turn(self, key: Key) -> None:
        """Retry requests that compete for one thing in the order in which they came, up to the first that waits."""
        while waiting := self._by_key.get(key):
            if not self._try(next(iter(waiting.values()))):
                return

    def _try_all(self, key: Key) -> None:
        for entry in list(self._by_key.get(key, {}).values()):
            if not entry.removed:
                self._try(entry)

    def _try(self, entry: WaitingRequest) -> bool:
        if self.answer(entry):
            self._remove(entry)
            return True
        if isinstance(entry.request, m.Get):
            self._unindex(entry)
            self._index(entry)
        return False

    def _remove(self, entry: WaitingRequest) -> None:
        entry.removed = True
        self._unindex(entry)
        self._by_name.pop(entry.name, None)
        left = self._of_session.get(entry.session, 1) - 1
        if left:
            self._of_session[entry.session] = left
        else:
            self._of_session.pop(entry.session, None)

    def _index(self, entry: WaitingRequest) -> None:
        entry.key = self._key_of(entry.request)
        self._by_key.setdefault(entry.key, {})[entry.name] = entry

    def _unindex(self, entry: WaitingRequest) -> None:
        same_key = self._by_key.get(entry.key, {})
        same_key.pop(entry.name, None)
        if not same_key:
            self._by_key.pop(entry.key, None)

    def _key_of(self, request: m.AnyRequest) -> Key:
        match request:
            case m.Hello():
                return ("hello", "", "")
            case m.Room():
                return ("room", "", "")
            case m.Claim() if request.count:
                return ("task", request.partition, request.task)
            case m.Get():
                return ("get", request.partition, self._first_missing(request))
            case m.PartitionRequest():
                return ("partition", request.partition, "")
        raise TypeError(f"a {type(request).__name__} never waits")

    def _first_missing(self, request: m.Get) -> int:
        samples = self.engine.partitions[request.partition].samples.samples
        wanted = set(request.fields)
        return next((i for i in request.ids if i not in samples or not wanted <= samples[i].fields), -1)
