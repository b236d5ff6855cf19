"""Base of both kinds of partition: samples, their columns, and the calls that every partition answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from xtoken_core.queue.budget import FIELD_BYTES
from xtoken_core.queue.response import Response
from xtoken_core.queue.sample import Status
from xtoken_core.queue.samples import Samples
from xtoken_core.queue.store import Store
from xtoken_core.wire import Column, QueueError
from xtoken_core.wire import messages as m
from xtoken_core.wire.bounds import MAX_OBJECT_VALUES
from xtoken_core.wire.objects import check_objects

Handler = Callable[[Any, Any], Response | None]
FieldKind = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PriorLease:
    """Lease that a request named, before the request changed it: its samples and task, or its block.

    For an ack: the samples that it ends.
    """

    ids: tuple[int, ...] = ()
    task: str = ""
    block: int | None = None


class Partition(ABC):
    """Samples of one name space.

    Attributes:
        HANDLERS: Call by type of request; put and complete, which carry columns, are methods.
        definition: The message that opened it; opening it again with the same one is no error.
        rows_put: Number of rows that were new.
        kinds: Kind, dtype and item shape of every field, set by its first rows.
        sealed: Nothing will be put any more.
        ordered_tasks: Number of tasks that keep the samples in an order of their own.
        charged: Bytes that the budget's account of samples holds for this partition.
    """

    HANDLERS: ClassVar[Mapping[type[m.Request], Handler]]

    def __init__(self, definition: m.OpenPartition, samples: Samples) -> None:
        self.name = definition.partition
        self.definition = definition
        self.samples = samples
        self.store = Store()
        self.kinds: dict[str, FieldKind] = {}
        self.rows_put = 0
        self.sealed = False
        self.charged = 0
        self.ordered_tasks = sum(task.order != "by_id" for task in samples.tasks.values())

    # Calls

    def handle(self, request: m.PartitionRequest) -> Response | None:
        """Answer a request without columns; None means "not yet".

        Raises:
            QueueError: The request is refused.
        """
        handler = self.HANDLERS.get(type(request))
        if handler is None:
            raise self.misplaced()
        return handler(self, request)

    @abstractmethod
    def put(self, request: m.Put, columns: dict[str, Column], room: int) -> Response:
        """Store columns for ids; `room` bytes are free."""

    @abstractmethod
    def complete(self, request: m.Complete, columns: dict[str, Column], room: int) -> Response:
        """Put the result of a lease and finish the lease; `room` bytes are free for results."""

    @abstractmethod
    def misplaced(self) -> QueueError:
        """Return the refusal of a call that belongs to the other kind of partition."""

    def prior_lease(self, request: Any) -> PriorLease:
        """Return the lease of samples that an `Ack`, `Complete` or `Nack` names, for the write-ahead log."""
        lease = self.samples.leases.get(request.lease)
        return PriorLease() if lease is None else PriorLease(lease.ids, lease.task)

    def seal(self, _: m.Seal) -> Response:
        """Accept no puts any more."""
        self.sealed = True
        return Response(m.Ok())

    def get(self, request: m.Get) -> Response | None:
        """Read fields of samples, once all are there."""
        held, finished = self.samples.samples, self.samples.finished
        missing = self.samples.lacking(request.ids, request.fields)
        if missing:
            gone = [i for i in missing if i in finished]
            if request.wait_s and not gone and not self.sealed:
                return None
            first = (gone or missing)[0]
            lacks = sorted(set(request.fields) - (held[first].fields if first in held else set()))
            raise QueueError("unknown_sample", f"sample {first} has no {', '.join(lacks) or 'row'} here")
        return Response(m.Rows(ids=request.ids, columns=[]), self.store.read(request.ids, request.fields))

    def list_samples(self, request: m.ListSamples) -> Response:
        """List the ids in a state, ascending."""
        samples = self.samples
        reasons = {"dead": samples.dead, "skipped": self.skipped}.get(request.state)
        if reasons is None:
            task = self.task(request.task)
            try:
                status = Status[request.state.upper()]
            except KeyError:
                raise QueueError("bad_request", f"unknown state {request.state!r}") from None
            matching = {s.id for s in samples.samples.values() if s.status[task] == status and s.id not in samples.dead}
        else:
            matching = set(reasons)
        ids = sorted(i for i in matching if i > request.after)[: request.limit]
        return Response(m.Listed(ids=ids, reasons={i: reasons[i] for i in ids} if reasons else {}))

    def peek(self, request: m.Peek) -> Response:
        """Describe one sample without changing it."""
        sample = self.samples.samples.get(request.sample)
        reason = self.samples.dead.get(request.sample) or self.skipped.get(request.sample, "")
        if sample is None and not reason:
            raise QueueError("unknown_sample", f"sample {request.sample} is not here")
        status = {name: state.name.lower() for name, state in sample.status.items()} if sample else {}
        attempts = sample.attempts if sample else 0
        fields = self.store.fields(request.sample)
        return Response(m.Peeked(fields=fields, status=status, attempts=attempts, reason=reason))

    # State

    @property
    def skipped(self) -> Mapping[int, str]:
        """Return the reason of every tombstone, by id."""
        return {}

    @property
    def volatile(self) -> frozenset[str]:
        """Return the fields that belong to a session and are never journalled."""
        return frozenset(self.definition.volatile)

    def lease_ids(self) -> list[int]:
        """Return the number of every current lease."""
        return list(self.samples.leases)

    def drop_stale(self) -> None:
        """Drop columns that the last change has made useless; the generic queue keeps none."""
        return

    def statistics(self) -> dict[str, Any]:
        """Return the statistics specific to this kind of partition."""
        return {}

    def same_as(self, other: m.OpenPartition) -> bool:
        """Return whether the message defines this very partition."""
        mine = self.definition
        return mine == msgspec.structs.replace(other, id=mine.id, session=mine.session)

    def task(self, name: str) -> str:
        """Return the name of a task that exists.

        Raises:
            QueueError: `unknown_task`.
        """
        if name not in self.samples.tasks:
            known = ", ".join(self.samples.tasks) or "none"
            raise QueueError("unknown_task", f"partition {self.name!r} has no task {name!r} (its tasks: {known})")
        return name

    @property
    def overhead(self) -> int:
        """Return the bookkeeping of what the partition holds in bytes."""
        return self.samples.overhead + self.store.overhead + len(self.kinds) * FIELD_BYTES

    # Columns

    def check(self, columns: Mapping[str, Column], rows: int, most_values: int = MAX_OBJECT_VALUES) -> None:
        """Check the number of rows, and that each field keeps the kind, dtype and item shape of its first rows.

        Args:
            columns: Columns by name.
            rows: Number of rows that each must have.
            most_values: Number of values that all rows of objects may have together.

        Raises:
            QueueError: `conflict`, with the field's name; `bad_request` for another number of rows; `bad_request` or
                `too_large` for a row that is no bounded msgpack value, or for too many values.
        """
        for name, column in columns.items():
            if column.rows != rows:
                raise QueueError("bad_request", f"column {name!r} has {column.rows} rows for {rows} samples")
        for name, column in columns.items():
            kind = _kind(column)
            known = self.kinds.get(name, kind)
            if kind != known:
                raise QueueError("conflict", f"field {name!r} is {_words(known)} here, and {_words(kind)} came")
        check_objects((column for column in columns.values() if column.kind == "object"), most_values)

    def keep(self, ids: Sequence[int], columns: Mapping[str, Column], new: Iterable[int]) -> None:
        """Store the rows of `new`, some of `ids`."""
        new = list(new)
        self.rows_put += len(new)
        self.learn(columns)
        self.store.put(ids, dict(columns), new)

    def learn(self, columns: Mapping[str, Column]) -> None:
        """Record kind, dtype and item shape of fields, which later rows must have too."""
        self.kinds.update({name: _kind(column) for name, column in columns.items()})


COMMON_HANDLERS: dict[type[m.Request], Handler] = {
    m.Seal: Partition.seal,
    m.Get: Partition.get,
    m.ListSamples: Partition.list_samples,
    m.Peek: Partition.peek,
}


def _kind(column: Column) -> FieldKind:
    return column.kind, column.dtype, column.item_shape


def _words(kind: FieldKind) -> str:
    return " ".join(word for word in (kind[0], kind[1], str(list(kind[2])) if kind[2] else "") if word)
