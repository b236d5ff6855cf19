"""Samples and tasks: which fields of a sample are produced, and how far each task is with it.

Per task a sample goes `WAITING -> READY -> LEASED -> DONE`. A lease belongs to a session and has no clock of its own.
Pure bookkeeping: the columns themselves are kept by `xtoken_core.queue.store`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter

from xtoken_core.queue.intervals import IntervalSet
from xtoken_core.queue.tasks.ready_queue import ReadyQueue
from xtoken_core.queue.tasks.sample import Lease, Sample, Status, Task
from xtoken_core.wire import QueueError

__all__ = ["Lease", "Sample", "Samples", "Status", "Task"]

SPARE_PLACES = 1024
FIELDS_OF = attrgetter("fields")


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
        self._turns = {t.name: ReadyQueue() for t in self.tasks.values() if t.order != "by_id"}
        self._lease_of: dict[str, dict[int, int]] = {name: {} for name in self.tasks}

    # What producers do

    def produce(self, ids: Sequence[int], fields: Iterable[str]) -> list[int]:
        """Note that `ids` have `fields` now; returns the ids for which this is news (the others are retries)."""
        came = frozenset(fields)
        if all(known.isdisjoint(ids) for known in (self.samples.keys(), self.dead.keys(), self.finished)):
            self._admit(ids, came)
            return list(ids)
        news = []
        for sample_id in ids:
            if sample_id in self.finished or sample_id in self.dead:
                continue
            sample = self.samples.get(sample_id)
            if sample is None:
                self._admit([sample_id], came)
            elif came <= sample.fields:
                continue
            else:
                sample.fields |= came
                self._refresh(sample)
            news.append(sample_id)
        return news

    def _admit(self, ids: Sequence[int], fields: frozenset[str]) -> None:
        """New samples, at the end of the order of puts."""
        status = {name: Status.READY if t.requires <= fields else Status.WAITING for name, t in self.tasks.items()}
        places = list(range(self._puts, self._puts + len(ids)))
        self._puts += len(ids)
        made = map(Sample, ids, places, repeat(fields), repeat(status))
        self.samples.update(zip(ids, made, strict=True))
        for name, turns in self._turns.items():
            if self.tasks[name].order == "strict":
                turns.extend(ids, places)
            elif status[name] == Status.READY:
                turns.extend(ids, range(self._ready_count + 1, self._ready_count + 1 + len(ids)))
                self._ready_count += len(ids)
            self._prune(turns)

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
        lease = self.leases.get(self._lease_of[task].get(alive[0], -1)) if alive else None
        if lease is not None and lease.session == session and lease.ids == alive:
            return lease
        missing = [i for i in alive if i not in self.samples]
        if missing:
            raise QueueError("unknown_sample", f"sample {missing[0]} is not here")
        if any(self.samples[i].status[task] != Status.READY for i in alive):
            return None
        needed = frozenset(fields)
        for sample_id in alive:
            _check_fields(self.samples[sample_id], needed)
        lost = [i for i in ids if i not in self.samples]
        if lost and needed:
            raise QueueError("unknown_sample", f"sample {lost[0]} has died and is not here")
        return self._lease(session, task, alive)

    def claim_next(self, session: str, task: str, count: int, fields: Iterable[str] = ()) -> Lease | None:
        """Lease up to `count` samples in the task's order; None while there is none.

        Raises:
            QueueError: `unknown_sample` if one of them lacks one of `fields`; nothing is leased then.
        """
        turns, strict, needed = self._turns[task], self.tasks[task].order == "strict", frozenset(fields)
        places: dict[int, int] = {}
        taken: list[int] = []
        try:
            while len(taken) < count and (turn := turns.pop()) is not None:
                place, sample_id = turn
                sample = self.samples.get(sample_id)
                if sample is None:
                    continue
                status = sample.status[task]
                if strict and status == Status.WAITING:
                    turns.add(sample_id, place)
                    break
                places[sample_id] = place
                if status == Status.READY:
                    _check_fields(sample, needed)
                    taken.append(sample_id)
        except QueueError:
            for sample_id, place in places.items():
                turns.add(sample_id, place)
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
        done = set(ids)
        gone = self._mark_done(task, done)
        lease_of = self._lease_of[task]
        for lease_id in {lease_of.pop(i) for i in done if i in lease_of}:
            lease = self.leases[lease_id]
            lease.ids = tuple(i for i in lease.ids if i not in done)
            if not lease.ids:
                del self.leases[lease_id]
        self.finished.add_all(gone)
        for sample_id in gone:
            del self.samples[sample_id]
        return gone

    def _mark_done(self, task: str, ids: Iterable[int]) -> list[int]:
        """Mark living samples; returns those that every task has done."""
        gone = []
        before: Mapping[str, Status] = {}
        after, last = before, False
        for sample_id in ids:
            sample = self.samples.get(sample_id)
            if sample is None or sample_id in self.dead:
                continue
            if sample.status is not before:
                before = sample.status
                after = {**before, task: Status.DONE}
                last = all(status == Status.DONE for status in after.values())
            sample.status = after
            if last:
                gone.append(sample_id)
        return gone

    def give_back(self, lease_id: int) -> Lease | None:
        """Revoke a lease: what is left of it is ready again (or waits, where a field is gone)."""
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return None
        self.given_back += len(lease.ids)
        for sample_id in lease.ids:
            del self._lease_of[lease.task][sample_id]
            sample = self.samples.get(sample_id)
            if sample is not None and sample_id not in self.dead:
                sample.mark(lease.task, Status.WAITING)
                self._refresh(sample)
                self._push(sample, [lease.task])
        return lease

    def undo(self, lease_id: int) -> None:
        """A claim is refused after all: nothing has been leased."""
        lease = self.give_back(lease_id)
        self.given_back -= len(lease.ids) if lease is not None else 0

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
        for lease_of in self._lease_of.values():
            for lease_id in {lease_of.pop(i) for i in gone if i in lease_of}:
                lease = self.leases[lease_id]
                lease.ids = tuple(i for i in lease.ids if i not in gone)
                if not lease.ids:
                    del self.leases[lease_id]

    def start_over(self) -> None:
        """Forget everything that was ever put; numbers of leases go on."""
        self.samples.clear()
        self.leases.clear()
        self.dead.clear()
        self.finished = IntervalSet()
        for lease_of in self._lease_of.values():
            lease_of.clear()
        for turns in self._turns.values():
            turns.clear()

    def reset(self) -> None:
        """Every task starts over on the samples that are held; leases are gone."""
        for lease_id in list(self.leases):
            self.give_back(lease_id)
        for sample in self.samples.values():
            if sample.id not in self.dead:
                sample.status = dict.fromkeys(sample.status, Status.WAITING)
                self._refresh(sample)
                self._push(sample, self._turns)

    def line_up(self) -> None:
        """After a restart all that is ready became so at once: an `arrival` task goes by the order of puts too."""
        for turns in self._turns.values():
            turns.clear()
        for sample in sorted(self.samples.values(), key=attrgetter("put_at")):
            self._push(sample, self._turns)

    # Looking

    def lacking(self, ids: Sequence[int], fields: Iterable[str]) -> list[int]:
        """Those of `ids` that are not held or lack one of `fields`."""
        held, needed = self.samples, frozenset(fields)
        if held.keys() >= set(ids) and all(map(needed.issubset, set(map(FIELDS_OF, map(held.__getitem__, ids))))):
            return []
        return [i for i in ids if i not in held or not needed <= held[i].fields]

    def held(self, lease_id: int, session: str | None = None) -> Lease:
        """A lease that stands.

        Raises:
            QueueError: `lease_revoked` if it does not, or not for this session.
        """
        lease = self.leases.get(lease_id)
        if lease is None or (session is not None and lease.session != session):
            raise QueueError("lease_revoked", f"lease {lease_id} is not held any more")
        return lease

    def held_by(self, session: str, task: str, ids: Iterable[int]) -> set[int]:
        """Those of `ids` that a session has leased for a task."""
        lease_of = self._lease_of[task]
        held = {i: lease_of[i] for i in ids if i in lease_of}
        mine = {lease for lease in set(held.values()) if self.leases[lease].session == session}
        return {i for i, lease in held.items() if lease in mine}

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
            self._lease_of[task].update(dict.fromkeys(ids, lease.id))
        before: Mapping[str, Status] = {}
        after = before
        for sample in map(self.samples.__getitem__, ids):
            if sample.status is not before:
                before = sample.status
                after = {**before, task: Status.LEASED}
            sample.status = after
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
            turns = self._turns.get(name)
            if turns is None:
                continue
            if self.tasks[name].order == "strict":
                turns.add(sample.id, sample.put_at)
            elif sample.status[name] == Status.READY:
                self._ready_count += 1
                turns.add(sample.id, self._ready_count)
            self._prune(turns)

    def _prune(self, turns: ReadyQueue) -> None:
        """Now and then forget samples that have gone."""
        if len(turns) > 2 * len(self.samples) + SPARE_PLACES:
            turns.prune(self.samples)


def _check_fields(sample: Sample, needed: frozenset[str]) -> None:
    if not needed <= sample.fields:
        missing = ", ".join(sorted(needed - sample.fields))
        raise QueueError("unknown_sample", f"sample {sample.id} has no {missing} here")
