"""Generic partition: tasks claim samples in an order, and volatile fields belong to the session that put them."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import ClassVar

from xtoken_core.queue.budget import QUEUED_BYTES, VOLATILE_BYTES
from xtoken_core.queue.intervals import IntervalSet
from xtoken_core.queue.partition import COMMON_HANDLERS, Handler, Partition, PriorLease
from xtoken_core.queue.response import Response
from xtoken_core.queue.sample import Lease, Sample, Status, Task
from xtoken_core.queue.samples import Samples, check_distinct, check_fields
from xtoken_core.queue.sessions import Sessions
from xtoken_core.wire import Column, QueueError
from xtoken_core.wire import messages as m

SPARE_ENTRIES = 1024
"""Stale entries that a ready queue may hold beyond twice the samples before it is pruned."""


class TaskPartition(Partition):
    """A partition of the generic task queue."""

    samples: OrderedSamples

    def __init__(self, definition: m.OpenPartition, sessions: Sessions) -> None:
        super().__init__(definition, OrderedSamples(tasks_of(definition), definition.max_attempts))
        self._owned: dict[str, dict[tuple[int, str], tuple[str, ...]]] = {}
        self._owned_entries = 0
        sessions.on_end.append(self.session_ended)

    # Calls

    def put(self, request: m.Put, columns: dict[str, Column], room: int) -> Response:
        """Store columns for ids.

        Raises:
            QueueError: `conflict` if the partition is sealed, or a field has another kind; `no_room`; `bad_request`.
        """
        check_distinct(request.ids)
        self.check(columns, len(request.ids))
        if request.lease is not None:
            raise self.misplaced()
        if self.sealed:
            raise QueueError("conflict", f"partition {self.name!r} is sealed")
        if request.tombstones:
            raise QueueError("bad_request", "tombstones belong to the block of a run")
        size = _check_room(columns, room)
        # Before `produce` adds the fields: afterwards none is lacking.
        volatile = self._lacking_volatile(request.ids, columns)
        new = self.samples.produce(request.ids, columns)
        self.own_volatile(request.session, volatile)
        self.keep(request.ids, columns, new)
        return Response(m.Stored(room=room - size))

    def complete(self, request: m.Complete, columns: dict[str, Column], room: int) -> Response:
        """Put a lease's result and finish the lease.

        Raises:
            QueueError: `lease_revoked`, `conflict`, `no_room`, `bad_request`.
        """
        lease = self.samples.held(request.lease, request.session)
        self.check(columns, len(lease.ids))
        _check_room(columns, room)
        ids = lease.ids
        volatile = self._lacking_volatile(ids, columns)
        new = self.samples.produce(ids, columns) if columns else []
        self.keep(ids, columns, new)
        self.own_volatile(request.session, volatile, lease.task)
        if len(volatile) < len(ids) * len(self.volatile.intersection(columns)):
            self._rely_on_volatile(ids, columns, lease.task)
        self.store.drop(self.samples.finish(lease.task, ids))
        return Response(m.Ok())

    def claim(self, request: m.Claim) -> Response | None:
        """Lease samples of a task, by ids or in the task's order.

        Raises:
            QueueError: `exhausted` once a sealed partition has nothing left for the task; `unknown_sample`,
                `unknown_task`, `bad_request`.
        """
        task = self.task(request.task)
        if bool(request.ids) == bool(request.count):
            raise QueueError("bad_request", "a claim names either ids or a count")
        check_distinct(request.ids)
        dead = [i for i in request.ids if i in self.samples.dead]
        if request.ids and len(dead) == len(request.ids):
            return Response(m.Claimed(lease=0, ids=[], dead=dead))
        before = self.samples.last_lease
        lease = self._lease(request, task)
        if lease is None:
            if self.exhausted(task):
                raise QueueError(
                    "exhausted", f"task {task!r} has done everything that partition {self.name!r} will hold"
                )
            return None
        try:
            columns = self.store.read(lease.ids, request.fields)
        except BaseException:
            # A lease that was there before the claim belongs to an earlier request and stays.
            if lease.id > before:
                self.samples.undo_claim(lease.id)
            raise
        return Response(m.Claimed(lease=lease.id, ids=list(lease.ids), dead=dead), columns)

    def ack(self, request: m.Ack) -> Response:
        """Mark samples that the session holds as done by a task.

        Raises:
            QueueError: `lease_revoked` if a sample is neither leased to the session nor done.
        """
        task = self.task(request.task)
        mine = self.samples.held_by(request.session, task, request.ids)
        held, finished = self.samples.samples, self.samples.finished
        foreign = [
            i
            for i in request.ids
            if i not in mine and i not in finished and (i not in held or held[i].status[task] != Status.DONE)
        ]
        if foreign:
            raise QueueError("lease_revoked", f"sample {foreign[0]} is not leased to this session for task {task!r}")
        self.store.drop(self.samples.finish(task, mine))
        return Response(m.Ok())

    def nack(self, request: m.Nack) -> Response:
        """Refuse samples of a lease and give the others back.

        Raises:
            QueueError: `lease_revoked`.
        """
        self.samples.held(request.lease, request.session)
        self.samples.refuse(request.lease, request.ids, request.reason)
        return Response(m.Ok())

    def clear(self, request: m.Clear) -> Response:
        """Drop samples, or reset the partition to empty."""
        if request.everything:
            self.reset()
        else:
            self.drop(request.ids)
        return Response(m.Ok())

    def misplaced(self) -> QueueError:
        """Return the refusal of a call of a run."""
        return QueueError("bad_request", f"partition {self.name!r} is not the queue of a run")

    HANDLERS: ClassVar[Mapping[type[m.Request], Handler]] = {
        **COMMON_HANDLERS,
        m.Claim: claim,
        m.Ack: ack,
        m.Nack: nack,
        m.Clear: clear,
    }

    # State

    @property
    def overhead(self) -> int:
        """Return the bookkeeping of what the partition holds in bytes."""
        return super().overhead + self._owned_entries * VOLATILE_BYTES

    def prior_lease(self, request: m.Ack | m.Complete | m.Nack) -> PriorLease:
        """Return the lease that a request names, for the write-ahead log."""
        if isinstance(request, m.Ack):
            known = request.task in self.samples.tasks
            mine = self.samples.held_by(request.session, request.task, request.ids) if known else ()
            return PriorLease(tuple(mine), request.task)
        return super().prior_lease(request)

    def exhausted(self, task: str) -> bool:
        """Return whether a task will never get another sample."""
        if not self.sealed:
            return False
        return all(s.status[task] == Status.DONE for s in self.samples.samples.values())

    def drop(self, ids: Sequence[int]) -> None:
        """Drop samples with their leases and dead letters; those that are held count as finished."""
        for sample_id in ids:
            self.samples.dead.discard(sample_id)
            if sample_id in self.samples.samples:
                self.samples.finished.add(sample_id)
        self.samples.drop(ids)
        self.store.drop(ids)

    def reset(self) -> None:
        """Reset to empty: no samples, no dead letters, not sealed, any id may be put."""
        self.store.drop(list(self.samples.samples))
        self.samples.clear()
        self.kinds.clear()
        self._owned.clear()
        self._owned_entries = 0
        self.sealed = False

    # Volatile fields

    def own_volatile(self, session: str, put: Sequence[tuple[int, str]], task: str = "") -> None:
        """Record volatile fields, by sample, as the session's own; `task` was completed by putting them."""
        if not put:
            return
        mine, tasks = self._owned.setdefault(session, {}), (task,) if task else ()
        before = len(mine)
        mine.update(dict.fromkeys(put, tasks))
        self._owned_entries += len(mine) - before
        if self._owned_entries > 2 * len(self.samples.samples) * max(len(self.volatile), 1) + SPARE_ENTRIES:
            self._prune_owned()

    def _rely_on_volatile(self, ids: Sequence[int], fields: Iterable[str], task: str) -> None:
        """Record that `task` was completed by volatile fields, whichever session owns them."""
        for name in self.volatile.intersection(fields):
            for key in ((i, name) for i in ids):
                owned = next((owned for owned in self._owned.values() if key in owned), None)
                if owned is not None and task not in owned[key]:
                    owned[key] = (*owned[key], task)

    def _prune_owned(self) -> None:
        """Remove the entries of samples that are not held any more."""
        held = self.samples.samples
        for session, owned in list(self._owned.items()):
            self._owned[session] = {key: tasks for key, tasks in owned.items() if key[0] in held}
        self._owned_entries = sum(map(len, self._owned.values()))

    def provisional(self) -> set[tuple[str, int]]:
        """Return tasks and samples that are done only as long as a session owns a volatile result."""
        return {(task, i) for owned in self._owned.values() for (i, _), tasks in owned.items() for task in tasks}

    def session_ended(self, session: str) -> None:
        """Free the session's leases and withdraw its volatile fields, which have to be made again."""
        for lease in self.samples.of_session(session):
            self.samples.give_back(lease.id)
        owned = self._owned.pop(session, {})
        self._owned_entries -= len(owned)
        for (sample_id, name), tasks in owned.items():
            if sample_id in self.samples.samples:
                self.store.drop_fields([sample_id], [name])
                self.samples.withdraw(sample_id, name)
                # Done by a result that is gone: the task has to be done again.
                for task in tasks:
                    self.samples.reopen(sample_id, task)

    def _lacking_volatile(self, ids: Sequence[int], fields: Iterable[str]) -> list[tuple[int, str]]:
        """Return the volatile ones of `fields` that each sample, if it may be put, does not have yet."""
        names = self.volatile.intersection(fields)
        held, dead, finished = self.samples.samples, self.samples.dead, self.samples.finished
        return [
            (i, name)
            for name in sorted(names)
            for i in ids
            if i not in dead and i not in finished and (i not in held or name not in held[i].fields)
        ]

    def _lease(self, request: m.Claim, task: str) -> Lease | None:
        if request.ids:
            return self.samples.claim_ids(request.session, task, request.ids, request.fields)
        if self.samples.tasks[task].order == "by_id":
            raise QueueError("bad_request", f"task {task!r} is claimed by ids only")
        return self.samples.claim_next(request.session, task, request.count, request.fields)


def tasks_of(definition: m.OpenPartition) -> list[Task]:
    """Return the tasks that a partition is opened with.

    Raises:
        QueueError: `bad_request` if two have the same name.
    """
    names = [task.name for task in definition.tasks]
    if len(set(names)) < len(names):
        raise QueueError("bad_request", f"partition {definition.partition!r} names a task twice")
    return [Task(t.name, frozenset(t.requires), t.order) for t in definition.tasks]


def _check_room(columns: Mapping[str, Column], room: int) -> int:
    """Return the bytes of columns that fit into `room`."""
    size = sum(c.nbytes for c in columns.values())
    if size > room:
        raise QueueError("no_room", f"{size} bytes do not fit into {max(room, 0)}", {"room": max(room, 0)})
    return size


class OrderedSamples(Samples):
    """Samples of a generic partition, claimed by id or in a task's order."""

    def __init__(self, tasks: Iterable[Task], max_attempts: int = 3) -> None:
        super().__init__(tasks, max_attempts)
        self._ready_count = 0
        self._queues = {t.name: ReadyQueue() for t in self.tasks.values() if t.order != "by_id"}

    def claim_next(self, session: str, task: str, count: int, fields: Iterable[str] = ()) -> Lease | None:
        """Lease up to `count` samples in the task's order; None while there is none.

        Raises:
            QueueError: `unknown_sample` if one of them lacks one of `fields`; nothing is leased then.
        """
        queue, strict, needed = self._queues[task], self.tasks[task].order == "strict", frozenset(fields)
        checked: frozenset[str] | None = None  # samples of one put have one set of fields
        popped: list[tuple[int, int]] = []
        taken: list[int] = []
        try:
            while len(taken) < count and (entry := queue.pop()) is not None:
                key, sample_id = entry
                sample = self.samples.get(sample_id)
                if sample is None:
                    continue
                status = sample.status[task]
                # Strict order: nothing overtakes a sample that waits, so the claim ends here.
                if strict and status == Status.WAITING:
                    queue.add(sample_id, key)
                    break
                popped.append(entry)
                if status == Status.READY:
                    if sample.fields is not checked:
                        check_fields(sample, needed)
                        checked = sample.fields
                    taken.append(sample_id)
        except QueueError:
            # As if it had not been tried: a refused claim leaves the order as it was.
            for key, sample_id in popped:
                queue.add(sample_id, key)
            raise
        return self._lease(session, task, tuple(taken)) if taken else None

    def reopen(self, sample_id: int, task: str) -> None:
        """Undo a task's DONE after its result was lost: the sample waits, or is ready, again."""
        sample = self.samples.get(sample_id)
        if sample is not None and sample_id not in self.dead and sample.status[task] == Status.DONE:
            self.mark(sample, task, Status.WAITING)
            self._refresh(sample)
            self._enqueue(sample, [task])

    def clear(self) -> None:
        """Remove everything that was ever put; lease numbers are not reused."""
        self.samples.clear()
        self.leases.clear()
        self._leases_of.clear()
        self._statuses.clear()
        self.dead.clear()
        self.finished = IntervalSet()
        for lease_of in self._lease_of.values():
            lease_of.clear()
        for queue in self._queues.values():
            queue.clear()

    def rebuild_ready_queues(self) -> None:
        """Rebuild every task's order after a restart: all that is ready became so at once, in the order of puts."""
        for queue in self._queues.values():
            queue.clear()
        for sample in sorted(self.samples.values(), key=attrgetter("put_at")):
            self._enqueue(sample, self._queues)

    def held_by(self, session: str, task: str, ids: Iterable[int]) -> set[int]:
        """Select the `ids` that the session has leased for the task."""
        lease_of = self._lease_of[task]
        held = {i: lease_of[i] for i in ids if i in lease_of}
        mine = {lease for lease in set(held.values()) if self.leases[lease].session == session}
        return {i for i, lease in held.items() if lease in mine}

    @property
    def overhead(self) -> int:
        """Return the bookkeeping of the samples in bytes."""
        return super().overhead + self.queue_entries * QUEUED_BYTES

    @property
    def queue_entries(self) -> int:
        """Entries of all ready queues, stale ones included."""
        return sum(map(len, self._queues.values()))

    def _admit(self, ids: Sequence[int], fields: frozenset[str]) -> None:
        first = self._puts
        super()._admit(ids, fields)
        for name, queue in self._queues.items():
            task = self.tasks[name]
            if task.order == "strict":
                queue.extend(ids, range(first, first + len(ids)))
            elif task.requires <= fields:
                queue.extend(ids, range(self._ready_count + 1, self._ready_count + 1 + len(ids)))
                self._ready_count += len(ids)
            self._prune(queue)

    def _enqueue(self, sample: Sample, tasks: Iterable[str]) -> None:
        for name in tasks:
            queue = self._queues.get(name)
            if queue is None:
                continue
            if self.tasks[name].order == "strict":
                queue.add(sample.id, sample.put_at)
            elif sample.status[name] == Status.READY:
                self._ready_count += 1
                queue.add(sample.id, self._ready_count)
            self._prune(queue)

    def _prune(self, queue: ReadyQueue) -> None:
        """Remove stale entries once they outnumber the samples."""
        if len(queue) > 2 * len(self.samples) + SPARE_ENTRIES:
            queue.prune(self.samples)


class ReadyQueue:
    """Sample ids by key, lowest first; a sample has one key at a time.

    Most keys come in ascending order and are kept as the lists in which they came; only those of samples that come back
    need a heap. An entry that became stale because its sample got another key is skipped when it is reached.
    """

    __slots__ = ("_ascending", "_at", "_key_of", "_late", "_length")

    def __init__(self) -> None:
        self._key_of: dict[int, int] = {}
        self._ascending: deque[tuple[Sequence[int], Sequence[int]]] = deque()
        self._at = 0
        self._length = 0
        self._late: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """Return the number of entries, stale ones included."""
        return self._length + len(self._late)

    def add(self, sample_id: int, key: int) -> None:
        """Set the key of a sample, in place of the one it had."""
        if self._key_of.get(sample_id) == key:
            return
        # Above all others: appended in constant time. Only samples that come back take the heap.
        if not self._ascending or self._ascending[-1][0][-1] < key:
            self.extend([sample_id], [key])
        else:
            self._key_of[sample_id] = key
            heapq.heappush(self._late, (key, sample_id))

    def extend(self, ids: Sequence[int], keys: Sequence[int]) -> None:
        """Add samples with ascending keys above all others; both sequences are kept and must not change."""
        if ids:
            self._key_of.update(zip(ids, keys, strict=True))
            self._ascending.append((keys, ids))
            self._length += len(ids)

    def pop(self) -> tuple[int, int] | None:
        """Remove and return the lowest key and its sample."""
        late, key_of = self._late, self._key_of
        while self._ascending or late:
            entry = self._first() if self._ascending else late[0]
            if late and late[0] <= entry:
                entry = heapq.heappop(late)
            else:
                self._advance()
            key, sample_id = entry
            # Otherwise stale: the sample got another key, or has left, since this entry was made.
            if key_of.get(sample_id) == key:
                del key_of[sample_id]
                return entry
        return None

    def prune(self, held: Container[int]) -> None:
        """Remove samples that are not held, and all stale entries."""
        entries = sorted((key, i) for i, key in self._key_of.items() if i in held)
        self.clear()
        self.extend([i for _, i in entries], [key for key, _ in entries])

    def clear(self) -> None:
        """Remove every sample."""
        self._key_of.clear()
        self._ascending.clear()
        self._late.clear()
        self._at = self._length = 0

    def _first(self) -> tuple[int, int]:
        keys, ids = self._ascending[0]
        return keys[self._at], ids[self._at]

    def _advance(self) -> None:
        """Move past the first entry of the ascending lists."""
        self._at += 1
        self._length -= 1
        if self._at == len(self._ascending[0][0]):
            self._ascending.popleft()
            self._at = 0
