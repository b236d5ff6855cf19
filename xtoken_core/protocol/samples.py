"""Samples and tasks: which fields of a sample are produced, and how far each task is with it.

Per task a sample goes `WAITING -> READY -> LEASED -> DONE`. A lease belongs to a session and has no clock of its own.
Pure bookkeeping: the columns themselves are kept by `xtoken_core.protocol.store`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from xtoken_core.protocol.intervals import IntervalSet
from xtoken_core.wire import QueueError

Order = Literal["strict", "arrival", "by_id"]
SPARE_PLACES = 1024


class Status(IntEnum):
    """How far a task is with a sample."""

    WAITING = 0
    READY = 1
    LEASED = 2
    DONE = 3


@dataclass(frozen=True, slots=True)
class Task:
    """A consumer: it sees a sample once all of `requires` are produced.

    `strict` hands samples out in the order in which they were put, and waits for one that is not ready; `arrival` in
    the order in which they became ready; a `by_id` task is only claimed by ids.
    """

    name: str
    requires: frozenset[str]
    order: Order = "strict"


@dataclass(slots=True)
class Sample:
    """What is known of one sample. `put_at` is its place in the order of puts.

    `status` goes by task name; samples may share it, so it is replaced, never changed.
    """

    id: int
    put_at: int
    fields: frozenset[str]
    status: Mapping[str, Status]
    attempts: int = 0

    def mark(self, task: str, status: Status) -> None:
        """Set how far a task is with it."""
        self.status = {**self.status, task: status}


@dataclass(slots=True)
class Lease:
    """Samples of a task that a session works on; `ids` are those not yet acked or given back."""

    id: int
    session: str
    task: str
    ids: tuple[int, ...]
    claimed: tuple[int, ...] = field(default=())


class Samples:
    """The samples of one partition.

    Attributes:
        samples: Every sample that is held, by id.
        dead: Reason of every dead letter; its sample stays held until it is dropped.
        finished: Ids that every task has done and that were let go.
        given_back: How many leased samples became free again so far.
    """

    def __init__(self, tasks: Iterable[Task], max_attempts: int = 3) -> None:
        self.tasks = {task.name: task for task in tasks}
        self.max_attempts = max_attempts
        self.samples: dict[int, Sample] = {}
        self.leases: dict[int, Lease] = {}
        self.dead: dict[int, str] = {}
        self.finished = IntervalSet()
        self.given_back = 0
        self._puts = 0
        self._leased = 0
        self._ready_count = 0
        self._heaps: dict[str, list[tuple[int, int]]] = {t.name: [] for t in self.tasks.values() if t.order != "by_id"}
        self._places: dict[str, dict[int, int]] = {name: {} for name in self._heaps}

    # What producers do

    def produce(self, ids: Sequence[int], fields: Iterable[str]) -> list[int]:
        """Note that `ids` have `fields` now; returns the ids for which this is news (the others are retries)."""
        came = frozenset(fields)
        fresh = {name: Status.READY if t.requires <= came else Status.WAITING for name, t in self.tasks.items()}
        news = []
        for sample_id in ids:
            if sample_id in self.finished or sample_id in self.dead:
                continue
            sample = self.samples.get(sample_id)
            if sample is None:
                sample = Sample(sample_id, self._puts, came, fresh)
                self.samples[sample_id] = sample
                self._puts += 1
                self._push(sample, self._heaps)
            elif came <= sample.fields:
                continue
            else:
                sample.fields |= came
                self._refresh(sample)
            news.append(sample_id)
        return news

    def withdraw(self, sample_id: int, name: str) -> None:
        """Take back a volatile field: tasks that need it and are not at work on the sample wait again."""
        sample = self.samples.get(sample_id)
        if sample is not None:
            sample.fields -= {name}
            self._refresh(sample)

    # What consumers do

    def claim_ids(self, session: str, task: str, ids: Sequence[int], fields: Iterable[str] = ()) -> Lease | None:
        """Lease exactly these ids, dead ones left out; None while one of them is not ready.

        A lease on nothing, where all have died, needs neither ack nor nack.
        The session that holds them already gets the same lease again.

        Raises:
            QueueError: `unknown_sample` for an id that is not held, or one that is ready and lacks one of `fields`.
        """
        alive = tuple(i for i in ids if i not in self.dead)
        for lease in self.leases.values():
            if lease.session == session and lease.task == task and alive and lease.ids == alive:
                return lease
        missing = [i for i in alive if i not in self.samples]
        if missing:
            raise QueueError("unknown_sample", f"sample {missing[0]} is not here")
        if any(self.samples[i].status[task] != Status.READY for i in alive):
            return None
        needed = frozenset(fields)
        for sample_id in alive:
            _check_fields(self.samples[sample_id], needed)
        return self._lease(session, task, alive)

    def claim_next(self, session: str, task: str, count: int, fields: Iterable[str] = ()) -> Lease | None:
        """Lease up to `count` samples in the task's order; None while there is none.

        Raises:
            QueueError: `unknown_sample` if one of them lacks one of `fields`; nothing is leased then.
        """
        heap, places = self._heaps[task], self._places[task]
        strict, needed = self.tasks[task].order == "strict", frozenset(fields)
        seen: list[tuple[int, int]] = []
        taken: list[int] = []
        try:
            while heap and len(taken) < count:
                place, sample_id = heap[0]
                sample = self.samples.get(sample_id) if places.get(sample_id) == place else None
                if sample is not None and strict and sample.status[task] == Status.WAITING:
                    break
                heapq.heappop(heap)
                if sample is None:
                    continue
                del places[sample_id]
                seen.append((place, sample_id))
                if sample.status[task] == Status.READY:
                    _check_fields(sample, needed)
                    taken.append(sample_id)
        except QueueError:
            for place, sample_id in seen:
                places[sample_id] = place
                heapq.heappush(heap, (place, sample_id))
            raise
        return self._lease(session, task, tuple(taken)) if taken else None

    def reopen(self, sample_id: int, task: str) -> None:
        """A task's work on a sample was lost: it waits, or is ready, again."""
        sample = self.samples.get(sample_id)
        if sample is not None and sample_id not in self.dead and sample.status[task] == Status.DONE:
            sample.mark(task, Status.WAITING)
            self._refresh(sample)
            self._push(sample, [task])

    def finish(self, task: str, ids: Iterable[int]) -> list[int]:
        """The task has done these ids; returns those that every task has done and that are let go."""
        gone = []
        done = set(ids)
        for sample_id in done:
            sample = self.samples.get(sample_id)
            if sample is None or sample_id in self.dead:
                continue
            sample.mark(task, Status.DONE)
            if all(s == Status.DONE for s in sample.status.values()):
                gone.append(sample_id)
        for lease in [lease for lease in self.leases.values() if lease.task == task and not done.isdisjoint(lease.ids)]:
            lease.ids = tuple(i for i in lease.ids if i not in done)
            if not lease.ids:
                del self.leases[lease.id]
        for sample_id in gone:
            self.finished.add(sample_id)
            del self.samples[sample_id]
        return gone

    def give_back(self, lease_id: int) -> Lease | None:
        """Revoke a lease: what is left of it is ready again (or waits, where a field is gone)."""
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return None
        self.given_back += len(lease.ids)
        for sample_id in lease.ids:
            sample = self.samples.get(sample_id)
            if sample is not None and sample_id not in self.dead:
                sample.mark(lease.task, Status.WAITING)
                self._refresh(sample)
                self._push(sample, [lease.task])
        return lease

    def refuse(self, lease_id: int, ids: Iterable[int], reason: str) -> list[int]:
        """A nack: count an attempt against `ids`, give the whole lease back; returns the ids that died of it."""
        lease = self.held(lease_id)
        self.give_back(lease_id)
        died = []
        for sample_id in set(ids).intersection(lease.ids):
            sample = self.samples[sample_id]
            sample.attempts += 1
            if sample.attempts >= self.max_attempts:
                self.bury(sample_id, reason)
                died.append(sample_id)
        return sorted(died)

    def bury(self, sample_id: int, reason: str) -> None:
        """Make a sample a dead letter: no task gets it any more."""
        self.dead[sample_id] = reason
        sample = self.samples.get(sample_id)
        if sample is not None:
            sample.status = dict.fromkeys(sample.status, Status.DONE)

    def drop(self, ids: Iterable[int]) -> None:
        """Forget samples altogether, leases on them included."""
        gone = set(ids)
        for sample_id in gone:
            self.samples.pop(sample_id, None)
        for lease in list(self.leases.values()):
            if gone.intersection(lease.ids):
                lease.ids = tuple(i for i in lease.ids if i not in gone)
                if not lease.ids:
                    del self.leases[lease.id]

    def start_over(self) -> None:
        """Forget everything that was ever put; numbers of leases go on."""
        self.samples.clear()
        self.leases.clear()
        self.dead.clear()
        self.finished = IntervalSet()
        for name, heap in self._heaps.items():
            heap.clear()
            self._places[name].clear()

    def reset(self) -> None:
        """Every task starts over on the samples that are held; leases are gone."""
        for lease_id in list(self.leases):
            self.give_back(lease_id)
        for sample in self.samples.values():
            if sample.id not in self.dead:
                sample.status = dict.fromkeys(sample.status, Status.WAITING)
                self._refresh(sample)
                self._push(sample, self._heaps)

    # Looking

    def held(self, lease_id: int, session: str | None = None) -> Lease:
        """A lease that stands.

        Raises:
            QueueError: `lease_revoked` if it does not, or not for this session.
        """
        lease = self.leases.get(lease_id)
        if lease is None or (session is not None and lease.session != session):
            raise QueueError("lease_revoked", f"lease {lease_id} is not held any more")
        return lease

    def of_session(self, session: str) -> list[Lease]:
        """The session's leases."""
        return [lease for lease in self.leases.values() if lease.session == session]

    def next_lease_id(self) -> int:
        """A number for a lease, unique in this partition."""
        self._leased += 1
        return self._leased

    def _lease(self, session: str, task: str, ids: tuple[int, ...]) -> Lease:
        lease = Lease(self.next_lease_id(), session, task, ids, ids)
        if ids:
            self.leases[lease.id] = lease
        for sample_id in ids:
            self.samples[sample_id].mark(task, Status.LEASED)
        return lease

    def _refresh(self, sample: Sample) -> None:
        for name, task in self.tasks.items():
            status = sample.status[name]
            if status == Status.WAITING and task.requires <= sample.fields:
                sample.mark(name, Status.READY)
                if task.order == "arrival":
                    self._push(sample, [name])
            elif status == Status.READY and not task.requires <= sample.fields:
                sample.mark(name, Status.WAITING)

    def _push(self, sample: Sample, tasks: Iterable[str]) -> None:
        for name in tasks:
            if name not in self._heaps:
                continue
            place, places = sample.put_at, self._places[name]
            if self.tasks[name].order == "arrival":
                if sample.status[name] != Status.READY:
                    continue
                self._ready_count += 1
                place = self._ready_count
            elif places.get(sample.id) == place:
                continue
            places[sample.id] = place
            heap = self._heaps[name]
            heapq.heappush(heap, (place, sample.id))
            if len(heap) > 2 * len(self.samples) + SPARE_PLACES:
                self._prune(name)

    def _prune(self, task: str) -> None:
        """Forget the places of samples that have gone, or that became ready again later."""
        held = {i: place for i, place in self._places[task].items() if i in self.samples}
        self._places[task] = held
        self._heaps[task] = sorted((place, i) for i, place in held.items())


def _check_fields(sample: Sample, needed: frozenset[str]) -> None:
    if not needed <= sample.fields:
        missing = ", ".join(sorted(needed - sample.fields))
        raise QueueError("unknown_sample", f"sample {sample.id} has no {missing} here")
