"""Generic partition: tasks claim samples, and volatile fields belong to the session that put them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from xtoken_core.queue.budget import VOLATILE_BYTES
from xtoken_core.queue.partition import COMMON_HANDLERS, Handler, Partition, PriorLease
from xtoken_core.queue.response import Response
from xtoken_core.queue.sample import Lease, Status, Task
from xtoken_core.queue.samples import check_distinct
from xtoken_core.queue.sessions import Sessions
from xtoken_core.queue.tasks.samples import SPARE_ENTRIES, OrderedSamples
from xtoken_core.wire import Column, QueueError
from xtoken_core.wire import messages as m


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
        lease = self.samples.leases.get(request.lease)
        return PriorLease() if lease is None else PriorLease(lease.ids, lease.task)

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
