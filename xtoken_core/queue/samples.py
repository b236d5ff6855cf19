"""Sample table: the produced fields of every sample, its state per task, and the leases on it.

Per task a sample goes `WAITING -> READY -> LEASED -> DONE`. A lease belongs to a session and has no clock of its own.
The columns themselves are kept by `xtoken_core.queue.store`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter

from xtoken_core.queue.budget import BATCH_BYTES, INTERVAL_BYTES, LEASED_BYTES, SAMPLE_BYTES, STATUS_BYTES, ReasonMap
from xtoken_core.queue.intervals import IntervalSet
from xtoken_core.queue.sample import Lease, Sample, Status, Task
from xtoken_core.wire import QueueError

FIELDS_OF = attrgetter("fields")
SPARE_STATUSES = 256
"""Combinations of states that are kept although no sample may be in them."""


class Samples:
    """Samples of one partition, claimed by id.

    `xtoken_core.queue.tasks.partition.OrderedSamples` adds claims in a task's order.

    Attributes:
        samples: Every sample that is held, by id.
        dead: Reason of every dead letter; its sample stays held until it is dropped.
        finished: Ids that every task has done and whose samples were dropped.
        given_back: Number of leased samples that became free again so far.
        last_lease: Number of the latest lease.
    """

    def __init__(self, tasks: Iterable[Task], max_attempts: int = 3) -> None:
        self.tasks = {task.name: task for task in tasks}
        self.max_attempts = max_attempts
        self.samples: dict[int, Sample] = {}
        self.leases: dict[int, Lease] = {}
        self.dead = ReasonMap()
        self.finished = IntervalSet()
        self.given_back = 0
        self._puts = 0
        self.last_lease = 0
        self._leases_of: dict[str, dict[int, Lease]] = {}
        self._statuses: dict[bytes, Mapping[str, Status]] = {}
        self._lease_of: dict[str, dict[int, int]] = {name: {} for name in self.tasks}

    # Producers

    def produce(self, ids: Sequence[int], fields: Iterable[str]) -> list[int]:
        """Add `fields` to `ids` and return the ids that were changed by it; the others are repeated puts."""
        came = frozenset(fields)
        # Almost every put is of new samples only: three set operations instead of a loop.
        if all(known.isdisjoint(ids) for known in (self.samples.keys(), self.dead.keys(), self.finished)):
            self._admit(ids, came)
            return list(ids)
        changed = []
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
            changed.append(sample_id)
        return changed

    def withdraw(self, sample_id: int, name: str) -> None:
        """Remove a volatile field: tasks that require it and have not leased the sample wait again."""
        sample = self.samples.get(sample_id)
        if sample is not None:
            sample.fields -= {name}
            self._refresh(sample)

    # Consumers

    def claim_ids(self, session: str, task: str, ids: Sequence[int], fields: Iterable[str] = ()) -> Lease | None:
        """Lease exactly these ids without the dead ones; None while one of them is not ready.

        If all are dead the lease is empty and needs neither ack nor nack. A session that holds exactly these ids
        already gets the same lease again.

        Raises:
            QueueError: `unknown_sample` for an id that is not held, or one that is ready and lacks one of `fields`.
        """
        alive = tuple(i for i in ids if i not in self.dead)
        # A client that lost the reply claims again: it gets its lease, not a wait for itself.
        lease = self.leases.get(self._lease_of[task].get(alive[0], -1)) if alive else None
        if lease is not None and lease.session == session and lease.ids == alive:
            return lease
        missing = [i for i in alive if i not in self.samples]
        if missing:
            raise QueueError("unknown_sample", f"sample {missing[0]} is not here")
        # All or none: a part of a micro-batch would block its rest for everyone else.
        if any(self.samples[i].status[task] != Status.READY for i in alive):
            return None
        needed = frozenset(fields)
        for sample_id in alive:
            check_fields(self.samples[sample_id], needed)
        # A dead sample may have no row; its columns cannot be read beside the others'.
        lost = [i for i in ids if i not in self.samples]
        if lost and needed:
            raise QueueError("unknown_sample", f"sample {lost[0]} has died and is not here")
        return self._lease(session, task, alive)

    def finish(self, task: str, ids: Iterable[int]) -> list[int]:
        """Mark ids as done by the task; return those that every task has done, which are dropped."""
        done = set(ids)
        gone = self._mark_done(task, done)
        self._shrink_leases(self._lease_of[task], done)
        self.finished.add_all(gone)
        for sample_id in gone:
            del self.samples[sample_id]
        return gone

    def _mark_done(self, task: str, ids: Iterable[int]) -> list[int]:
        """Mark living samples as done; return those that every task has done."""
        gone = []
        # Samples of a batch share their status mapping: compute its successor once, not once per sample.
        before: Mapping[str, Status] = {}
        after, last = before, False
        for sample_id in ids:
            sample = self.samples.get(sample_id)
            if sample is None or sample_id in self.dead:
                continue
            if sample.status is not before:
                before = sample.status
                after = self._shared({**before, task: Status.DONE})
                last = all(status == Status.DONE for status in after.values())
            sample.status = after
            if last:
                gone.append(sample_id)
        return gone

    def give_back(self, lease_id: int) -> Lease | None:
        """Revoke a lease: its samples are ready again, or wait where a field is gone."""
        lease = self._remove_lease(lease_id)
        if lease is None:
            return None
        self.given_back += len(lease.ids)
        for sample_id in lease.ids:
            del self._lease_of[lease.task][sample_id]
            sample = self.samples.get(sample_id)
            if sample is not None and sample_id not in self.dead:
                self.mark(sample, lease.task, Status.WAITING)
                self._refresh(sample)
                # In a strict order they get their old place again; in an order of arrival they come last.
                self._enqueue(sample, [lease.task])
        return lease

    def undo_claim(self, lease_id: int) -> None:
        """Revoke a lease whose claim is refused after all, without counting it as given back."""
        lease = self.give_back(lease_id)
        self.given_back -= len(lease.ids) if lease is not None else 0

    def refuse(self, lease_id: int, ids: Iterable[int], reason: str) -> list[int]:
        """Count a failed attempt for `ids`, give the whole lease back and return the ids that died of it."""
        lease = self.held(lease_id)
        self.give_back(lease_id)
        return self.count_refusals(set(ids).intersection(lease.ids), reason)

    def count_refusals(self, ids: Iterable[int], reason: str, times: int = 1) -> list[int]:
        """Count failed attempts for the `ids` that are held; return those that died of it."""
        died = []
        for sample_id in ids:
            sample = self.samples.get(sample_id)
            if sample is None:
                continue
            sample.attempts += times
            # A dead one is counted too, but is reported as dying once only.
            if sample.attempts >= self.max_attempts:
                if sample_id not in self.dead:
                    died.append(sample_id)
                self.mark_dead(sample_id, reason)
        return sorted(died)

    def mark_dead(self, sample_id: int, reason: str) -> None:
        """Make a sample a dead letter, which no task gets any more."""
        self.dead[sample_id] = reason
        sample = self.samples.get(sample_id)
        if sample is not None:
            # Done by every task, so that no claim has to ask whether a sample lives.
            sample.status = self._shared(dict.fromkeys(sample.status, Status.DONE))

    def drop(self, ids: Iterable[int]) -> None:
        """Remove samples and the leases on them."""
        gone = set(ids)
        for sample_id in gone:
            self.samples.pop(sample_id, None)
        for lease_of in self._lease_of.values():
            self._shrink_leases(lease_of, gone)

    def reset(self) -> None:
        """Revoke all leases and let every task start over on the samples that are held."""
        for lease_id in list(self.leases):
            self.give_back(lease_id)
        for sample in self.samples.values():
            if sample.id not in self.dead:
                sample.status = self._shared(dict.fromkeys(sample.status, Status.WAITING))
                self._refresh(sample)
                self._enqueue(sample, self.tasks)

    # Look-up

    @property
    def overhead(self) -> int:
        """Return the bookkeeping of the samples in bytes."""
        nbytes = len(self.samples) * SAMPLE_BYTES + self.finished.count_intervals() * INTERVAL_BYTES
        for leased in self._lease_of.values():
            nbytes += len(leased) * LEASED_BYTES
        nbytes += len(self._statuses) * (BATCH_BYTES + len(self.tasks) * STATUS_BYTES)
        return nbytes + self.dead.nbytes if self.dead else nbytes

    def lacking(self, ids: Sequence[int], fields: Iterable[str]) -> list[int]:
        """Select the `ids` that are not held or lack one of `fields`."""
        held, needed = self.samples, frozenset(fields)
        # Samples of a batch share their set of fields: compare each distinct set once.
        if held.keys() >= set(ids) and all(map(needed.issubset, set(map(FIELDS_OF, map(held.__getitem__, ids))))):
            return []
        return [i for i in ids if i not in held or not needed <= held[i].fields]

    def held(self, lease_id: int, session: str | None = None) -> Lease:
        """Return a current lease.

        Raises:
            QueueError: `lease_revoked` if there is none, or it belongs to another session.
        """
        lease = self.leases.get(lease_id)
        if lease is None or (session is not None and lease.session != session):
            raise QueueError("lease_revoked", f"lease {lease_id} was revoked")
        return lease

    def of_session(self, session: str) -> list[Lease]:
        """Return the session's leases."""
        return list(self._leases_of.get(session, {}).values())

    def next_lease_id(self) -> int:
        """Return a lease number that is unique in this partition."""
        self.last_lease += 1
        return self.last_lease

    # Bookkeeping

    def mark(self, sample: Sample, task: str, status: Status) -> None:
        """Set a sample's state for one task."""
        sample.status = self._shared({**sample.status, task: status})

    def _shared(self, status: Mapping[str, Status]) -> Mapping[str, Status]:
        """Return the one mapping of these states, which all samples in them share."""
        return self._statuses.setdefault(bytes(status.values()), status)  # the hash of an enum is slow

    def prune_statuses(self) -> None:
        """Remove mappings of states in which no sample is."""
        if len(self._statuses) > SPARE_STATUSES:
            self._statuses = {bytes(s.status.values()): s.status for s in self.samples.values()}

    def _admit(self, ids: Sequence[int], fields: frozenset[str]) -> None:
        """Register new samples in put order."""
        ready, waiting = Status.READY, Status.WAITING
        status = self._shared({name: ready if t.requires <= fields else waiting for name, t in self.tasks.items()})
        put_at = range(self._puts, self._puts + len(ids))
        self._puts += len(ids)
        made = map(Sample, ids, put_at, repeat(fields), repeat(status))
        self.samples.update(zip(ids, made, strict=True))

    def _enqueue(self, sample: Sample, tasks: Iterable[str]) -> None:
        """Put a sample that is free again into the tasks' order; claims by id need none."""

    def _shrink_leases(self, lease_of: dict[int, int], ids: set[int]) -> None:
        """Take `ids` out of a task's leases, and remove leases that are empty by it."""
        for lease_id in {lease_of.pop(i) for i in ids if i in lease_of}:
            lease = self.leases[lease_id]
            # Emptied too, since a caller may still hold the object and ask for its samples.
            if ids.issuperset(lease.ids):
                lease.ids = ()
                self._remove_lease(lease_id)
            else:
                lease.ids = tuple(i for i in lease.ids if i not in ids)

    def _remove_lease(self, lease_id: int) -> Lease | None:
        lease = self.leases.pop(lease_id, None)
        if lease is not None:
            mine = self._leases_of[lease.session]
            del mine[lease_id]
            if not mine:
                del self._leases_of[lease.session]
        return lease

    def _lease(self, session: str, task: str, ids: tuple[int, ...]) -> Lease:
        lease = Lease(self.next_lease_id(), session, task, ids, ids)
        if ids:
            self.leases[lease.id] = lease
            # By session, since the end of one must free its leases without a look at all others.
            self._leases_of.setdefault(session, {})[lease.id] = lease
            self._lease_of[task].update(dict.fromkeys(ids, lease.id))
        before: Mapping[str, Status] = {}
        after = before
        for sample in map(self.samples.__getitem__, ids):
            if sample.status is not before:
                before = sample.status
                after = self._shared({**before, task: Status.LEASED})
            sample.status = after
        return lease

    def _refresh(self, sample: Sample) -> None:
        """Set WAITING or READY for every task that has not leased or done the sample."""
        for name, task in self.tasks.items():
            status = sample.status[name]
            if status == Status.WAITING and task.requires <= sample.fields:
                self.mark(sample, name, Status.READY)
                if task.order == "arrival":
                    self._enqueue(sample, [name])
            elif status == Status.READY and not task.requires <= sample.fields:
                self.mark(sample, name, Status.WAITING)


def check_distinct(ids: Sequence[int]) -> None:
    """Check that no id is named twice.

    Raises:
        QueueError: `bad_request`.
    """
    if len(set(ids)) < len(ids):
        raise QueueError("bad_request", "an id is there twice")


def check_fields(sample: Sample, needed: frozenset[str]) -> None:
    """Check that a sample has all `needed` fields.

    Raises:
        QueueError: `unknown_sample`, naming the missing ones.
    """
    if not needed <= sample.fields:
        missing = ", ".join(sorted(needed - sample.fields))
        raise QueueError("unknown_sample", f"sample {sample.id} has no {missing} here")
