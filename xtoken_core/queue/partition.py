"""A partition: its samples, where their columns lie, and, if it is a run's queue, the protocol of that run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from xtoken_core.queue.run.protocol import RunProtocol
from xtoken_core.queue.run.slot_columns import SignalColumns
from xtoken_core.queue.sessions import Sessions
from xtoken_core.queue.store import Store
from xtoken_core.queue.tasks.samples import Samples, Status, Task
from xtoken_core.wire import Column, QueueError, object_values
from xtoken_core.wire.messages import OpenPartition


class Partition:
    """One partition.

    Attributes:
        definition: The message that opened it; opening it again with the same one is no error.
        run: The protocol of the run, or None for a generic partition.
        signals: The columns of a run's signals, where they come through the queue; None for a generic partition.
        rows_put: Rows that were new.
        kinds: Kind, dtype and item shape of every field, as its first rows had them.
        sealed: Whether nothing will be put any more.
    """

    def __init__(self, definition: OpenPartition, sessions: Sessions) -> None:
        self.name = definition.partition
        self.definition = definition
        self.store = Store()
        self.volatile = frozenset(definition.volatile)
        self.kinds: dict[str, tuple[str, str, tuple[int, ...]]] = {}
        self.rows_put = 0
        self._vouched: dict[str, list[tuple[int, str, str]]] = {}
        self.run: RunProtocol | None = None
        self.signals: SignalColumns | None = None
        if definition.run is not None:
            self.run = _run(definition, sessions)
            self.samples = self.run.samples
            self.signals = SignalColumns(self.run.rings, self.store, self.run.teachers)
        else:
            self.samples = Samples(_tasks(definition), definition.max_attempts)
            sessions.on_end.append(self._session_ended)
        self.sealed = self.run is not None

    def same_as(self, other: OpenPartition) -> bool:
        """Whether the message defines this very partition."""
        mine = self.definition
        return (mine.tasks, mine.volatile, mine.max_attempts, mine.run) == (
            other.tasks,
            other.volatile,
            other.max_attempts,
            other.run,
        )

    def check(self, columns: Mapping[str, Column]) -> None:
        """A field keeps the kind, dtype and item shape of its first rows, so that any of its rows can be read together.

        Raises:
            QueueError: `conflict`, with the field's name; `bad_request` or `too_large` for a row that is no bounded
                msgpack value.
        """
        for name, column in columns.items():
            kind = _kind(column)
            known = self.kinds.get(name, kind)
            if kind != known:
                raise QueueError("conflict", f"field {name!r} is {_words(known)} here, and {_words(kind)} came")
            if column.kind == "object":
                object_values(column)

    def keep(self, ids: Sequence[int], columns: Mapping[str, Column], new: Iterable[int]) -> None:
        """Store the rows of `new`, some of `ids`."""
        new = list(new)
        self.rows_put += len(new)
        self.learn(columns)
        self.store.put(ids, dict(columns), new)

    def learn(self, columns: Mapping[str, Column]) -> None:
        """Note kind, dtype and item shape of fields: later rows must have the same."""
        self.kinds.update({name: _kind(column) for name, column in columns.items()})

    def lacking(self, ids: Sequence[int], fields: Iterable[str]) -> list[tuple[int, str]]:
        """Samples that may be put and the volatile ones of `fields` that they have not got."""
        names = self.volatile.intersection(fields)
        held, dead, finished = self.samples.samples, self.samples.dead, self.samples.finished
        return [
            (i, name)
            for name in sorted(names)
            for i in ids
            if i not in dead and i not in finished and (i not in held or name not in held[i].fields)
        ]

    def vouch(self, session: str, put: Sequence[tuple[int, str]], task: str = "") -> None:
        """Volatile fields belong to the session that put them, `task` being what it did by that."""
        if put:
            self._vouched.setdefault(session, []).extend((i, name, task) for i, name in put)

    def provisional(self) -> set[tuple[str, int]]:
        """Tasks and samples that are done only as long as a session vouches for what came of it."""
        return {(task, i) for vouched in self._vouched.values() for i, _, task in vouched if task}

    def forget(self, ids: Sequence[int]) -> None:
        """Let samples go for good, leases and dead letters included; they are finished."""
        for sample_id in ids:
            self.samples.dead.pop(sample_id, None)
            if sample_id in self.samples.samples:
                self.samples.finished.add(sample_id)
        self.samples.drop(ids)
        self.store.drop(ids)

    def start_over(self) -> None:
        """As on the day it was opened: no samples, no dead letters, not sealed, any id may come."""
        self.store.drop(list(self.samples.samples))
        self.samples.start_over()
        self.kinds.clear()
        self._vouched.clear()
        self.sealed = False

    def let_go(self, ids: Iterable[int]) -> None:
        """Free the memory of samples that are done."""
        self.store.drop(ids)

    def the_signals(self) -> SignalColumns:
        """The columns of the run's signals, without those whose slot is another's by now."""
        self.the_run()
        assert self.signals is not None
        self.signals.settle()
        return self.signals

    def the_run(self) -> RunProtocol:
        """The run's protocol.

        Raises:
            QueueError: `bad_request` if this is a generic partition.
        """
        if self.run is None:
            raise QueueError("bad_request", f"partition {self.name!r} is not the queue of a run")
        return self.run

    def task(self, name: str) -> str:
        """The task's name, if there is such a task.

        Raises:
            QueueError: `unknown_task`.
        """
        if name not in self.samples.tasks:
            known = ", ".join(self.samples.tasks) or "none"
            raise QueueError("unknown_task", f"partition {self.name!r} has no task {name!r} (its tasks: {known})")
        return name

    def lease_ids(self) -> list[int]:
        """Every lease that stands, of samples and of blocks."""
        return [*self.samples.leases, *(self.run.source.leases if self.run else ())]

    def exhausted(self, task: str) -> bool:
        """Whether a task will never get another sample."""
        if not self.sealed:
            return False
        return all(s.status[task] == Status.DONE for s in self.samples.samples.values())

    def _session_ended(self, session: str) -> None:
        """Its leases are free again; what only it could vouch for is withdrawn and has to be made anew."""
        for lease in self.samples.of_session(session):
            self.samples.give_back(lease.id)
        for sample_id, name, task in self._vouched.pop(session, []):
            if sample_id in self.samples.samples:
                self.store.drop_fields([sample_id], [name])
                self.samples.withdraw(sample_id, name)
                if task:
                    self.samples.reopen(sample_id, task)


def _kind(column: Column) -> tuple[str, str, tuple[int, ...]]:
    return column.kind, column.dtype, column.item_shape


def _words(kind: tuple[str, str, tuple[int, ...]]) -> str:
    return " ".join(word for word in (kind[0], kind[1], str(list(kind[2])) if kind[2] else "") if word)


def _tasks(definition: OpenPartition) -> list[Task]:
    names = [task.name for task in definition.tasks]
    if len(set(names)) < len(names):
        raise QueueError("bad_request", f"partition {definition.partition!r} names a task twice")
    return [Task(t.name, frozenset(t.requires), t.order) for t in definition.tasks]


def _run(definition: OpenPartition, sessions: Sessions) -> RunProtocol:
    run = definition.run
    if definition.tasks or run is None:
        raise QueueError("bad_request", "the tasks of a run's partition are given by the protocol: leave them out")
    return RunProtocol(
        sessions,
        positions=run.positions,
        samples_per_step=run.samples_per_step,
        block_size=run.block_size,
        span=run.span,
        teachers=run.teachers,
        ranks=run.ranks,
        slots=run.slots,
        max_attempts=definition.max_attempts,
        max_dead=run.max_dead,
        group=run.group,
        groups=run.groups,
    )
