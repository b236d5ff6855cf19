"""Samples that tasks claim in an order: that of the puts, or that of becoming ready."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from xtoken_core.queue.budget import QUEUED_BYTES
from xtoken_core.queue.intervals import IntervalSet
from xtoken_core.queue.sample import Lease, Sample, Status, Task
from xtoken_core.queue.samples import Samples, check_fields
from xtoken_core.queue.tasks.ready_queue import ReadyQueue
from xtoken_core.wire import QueueError

SPARE_ENTRIES = 1024
"""Stale entries that a ready queue may hold beyond twice the samples before it is pruned."""


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
