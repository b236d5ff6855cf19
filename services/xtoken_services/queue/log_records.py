"""Records of the write-ahead log: requests to records, and an engine to a snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any

import msgspec

from xtoken_core.queue.engine import Engine
from xtoken_core.queue.partition import Partition, PriorLease
from xtoken_core.queue.run.partition import RunPartition
from xtoken_core.queue.sample import Sample, Status
from xtoken_core.queue.tasks.partition import TaskPartition
from xtoken_core.wire import Column, ColumnHead, pack_columns, unpack_columns
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import Buffer

ROWS = 256

Times = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class Record(msgspec.Struct, tag_field="type", omit_defaults=True, kw_only=True):
    """A change of a partition."""

    partition: str


class Opened(Record, tag="opened", kw_only=True):
    """The partition was opened."""

    definition: m.OpenPartition


class Sealed(Record, tag="sealed", kw_only=True):
    """The partition was sealed."""


class Cleared(Record, tag="cleared", kw_only=True):
    """Record that samples, or all contents of a partition, were dropped."""

    ids: list[int] = []
    everything: bool = False


class Rows(Record, tag="rows", kw_only=True):
    """Columns were put for ids.

    Attributes:
        ids: The samples.
        columns: Heads of the columns.
        task: Task that completed the samples by this, if any.
        gone: Samples that every task has done by it, where one task's result is volatile.
    """

    ids: list[int]
    columns: list[ColumnHead] = []
    task: str = ""
    gone: list[int] = []


class BlockRows(Record, tag="block_rows", kw_only=True):
    """A block of a run was put, or what is left of one that a rewind has re-opened.

    Attributes:
        ids: Positions with a row.
        tombstones: Reasons of positions that were put without one.
        dead: Reasons of positions that are dead, in a snapshot.
        partial: These are not all positions of the block, in a snapshot.
        columns: Heads of the columns.
    """

    ids: list[int]
    tombstones: dict[int, str] = {}
    dead: dict[int, str] = {}
    columns: list[ColumnHead] = []
    partial: bool = False


class Done(Record, tag="done", kw_only=True):
    """A task has done samples; `gone` as in `Rows`."""

    task: str
    ids: list[int]
    gone: list[int] = []


class Refused(Record, tag="refused", kw_only=True):
    """Samples were refused, `times` times."""

    ids: list[int]
    reason: str
    times: Times = 1


class BlockRefused(Record, tag="block_refused", kw_only=True):
    """A block of a run was refused, `times` times."""

    block: int
    reason: str
    times: Times = 1


class AtStep(Record, tag="at_step", kw_only=True):
    """A run is at a step: it was rewound there or, with `acked`, the step before was acknowledged."""

    step: int
    acked: bool = False
    skipped: dict[int, str] = {}
    dead: dict[int, str] = {}


class GivenUp(Record, tag="given_up", kw_only=True):
    """A run was given up."""

    reason: str


class Finished(Record, tag="finished", kw_only=True):
    """Ids that every task has done, as half-open intervals."""

    intervals: list[tuple[int, int]]


AnyRecord = Opened | Sealed | Cleared | Rows | BlockRows | Done | Refused | BlockRefused | AtStep | GivenUp | Finished
Entry = tuple[Record, Sequence[Buffer]]
_decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)


def decode(head: Buffer) -> Record:
    """Decode a record from its head.

    Raises:
        msgspec.MsgspecError: The bytes are not a record.
    """
    return _decoder.decode(head)


# From requests to records


def record_of(engine: Engine, request: m.Request, buffers: Sequence[Buffer], prior: PriorLease) -> Entry | None:
    """Return the record of an answered request; None if it has changed nothing durable."""
    if not isinstance(request, m.PartitionRequest):
        return None
    part, name = engine.partitions[request.partition], request.partition
    match request:
        case m.OpenPartition():
            return Opened(partition=name, definition=request), ()
        case m.Seal():
            return Sealed(partition=name), ()
        case m.Clear():
            return Cleared(partition=name, ids=request.ids, everything=request.everything), ()
        case m.Put():
            return _put(part, request, buffers)
        case m.Complete() if isinstance(part, TaskPartition):
            return _complete(part, request, buffers, prior)
        case m.Ack():
            ids = list(prior.ids)
            return (Done(partition=name, task=request.task, ids=ids, gone=_gone(part, ids)), ()) if ids else None
        case m.Nack():
            return _nack(part, request, prior)
        case m.AckWindow() if isinstance(part, RunPartition):
            return AtStep(partition=name, step=part.run.cursor, acked=True), ()
        case m.Rewind():
            return AtStep(partition=name, step=request.step, skipped=request.skipped, dead=request.dead), ()
        case m.Giveup():
            return GivenUp(partition=name, reason=request.reason), ()
    return None


def _put(part: Partition, request: m.Put, buffers: Sequence[Buffer]) -> Entry:
    heads, kept = _durable(part, unpack_columns(request.columns, buffers))
    if request.lease is None:
        return Rows(partition=part.name, ids=request.ids, columns=heads), kept
    return BlockRows(partition=part.name, ids=request.ids, tombstones=request.tombstones, columns=heads), kept


def _complete(part: Partition, request: m.Complete, buffers: Sequence[Buffer], prior: PriorLease) -> Entry:
    columns = unpack_columns(request.columns, buffers)
    heads, kept = _durable(part, columns)
    task = prior.task if part.volatile.isdisjoint(columns) else ""
    ids, gone = list(prior.ids), _gone(part, prior.ids)
    return Rows(partition=part.name, ids=ids, columns=heads, task=task, gone=gone), kept


def _gone(part: Partition, ids: Sequence[int]) -> list[int]:
    """Return the finished ids where a replay cannot derive them: it leaves out tasks whose result is volatile."""
    return [i for i in ids if i in part.samples.finished] if part.volatile else []


def _nack(part: Partition, request: m.Nack, prior: PriorLease) -> Entry | None:
    if prior.block is not None:
        return BlockRefused(partition=part.name, block=prior.block, reason=request.reason), ()
    ids = sorted(set(prior.ids).intersection(request.ids))
    return (Refused(partition=part.name, ids=ids, reason=request.reason), ()) if ids else None


def _durable(part: Partition, columns: dict[str, Column]) -> tuple[list[ColumnHead], list[memoryview]]:
    return pack_columns({name: column for name, column in columns.items() if name not in part.volatile})


# From an engine to records


def snapshot(engine: Engine) -> Iterator[Entry]:
    """Yield the fewest records that restore an engine, without leases, sessions and volatile fields."""
    for part in engine.partitions.values():
        yield Opened(partition=part.name, definition=part.definition), ()
        if isinstance(part, RunPartition):
            yield from _run_records(part)
        elif isinstance(part, TaskPartition):
            yield from _task_records(part)


def _task_records(part: TaskPartition) -> Iterator[Entry]:
    samples = part.samples
    yield Finished(partition=part.name, intervals=list(samples.finished.intervals())), ()
    held = sorted(samples.samples.values(), key=lambda sample: sample.put_at)
    for fields, group in groupby(held, key=lambda sample: tuple(sorted(sample.fields - part.volatile))):
        yield from _rows(part, fields, [sample.id for sample in group])
    provisional = part.provisional()
    for task in samples.tasks:
        done = [
            s.id
            for s in held
            if s.status[task] == Status.DONE and s.id not in samples.dead and (task, s.id) not in provisional
        ]
        if done:
            yield Done(partition=part.name, task=task, ids=done), ()
    yield from _refusals(part, held)
    if part.sealed:
        yield Sealed(partition=part.name), ()


def _rows(part: Partition, fields: tuple[str, ...], ids: list[int]) -> Iterator[Entry]:
    for start in range(0, len(ids), ROWS):
        some = ids[start : start + ROWS]
        heads, buffers = pack_columns(part.store.read(some, fields))
        yield Rows(partition=part.name, ids=some, columns=heads), buffers


def _refusals(part: Partition, held: Iterable[Sample]) -> Iterator[Entry]:
    for sample in held:
        if sample.attempts:
            reason = part.samples.dead.get(sample.id, "")
            yield Refused(partition=part.name, ids=[sample.id], reason=reason, times=sample.attempts), ()


def _run_records(part: RunPartition) -> Iterator[Entry]:
    run, name = part.run, part.name
    start = run.cursor * run.samples_per_step
    skipped = {p: reason for p, reason in run.skipped.items() if p < start}
    dead = {p: reason for p, reason in run.samples.dead.items() if p < start}
    yield AtStep(partition=name, step=run.cursor, skipped=skipped, dead=dead), ()
    if run.failed:  # before any record that would let the run fail for another reason
        yield GivenUp(partition=name, reason=run.failed), ()
    samples, size = run.samples, run.blocks.block_size
    held = {p // size for p in (*samples.samples, *samples.dead) if p >= start}
    for first, stop in run.blocks.done.intervals():
        held.update(range(max(first, start // size), stop))
    for block in sorted(held):
        yield from _block_records(part, block)
    for block, times in run.blocks.refused.items():
        yield BlockRefused(partition=name, block=block, reason="", times=times), ()
    yield from _refusals(part, samples.samples.values())


def _block_records(part: RunPartition, block: int) -> Iterator[Entry]:
    """Yield what a block holds; one that a rewind has re-opened may hold a part of its positions only."""
    run, signals = part.run, set(part.run.slots.fields)
    positions = range(*run.blocks.bounds(block))
    fields_of = {p: run.samples.samples[p].fields - signals for p in positions if p in run.samples.samples}
    tombstones = {p: run.skipped[p] for p in positions if p in run.skipped and p not in fields_of}
    dead = {p: run.samples.dead[p] for p in positions if p in run.samples.dead}
    done, combinations = block in run.blocks.done, set(fields_of.values())
    if not done or len(combinations) > 1:  # rows from before a rewind may have other fields than those put later
        for fields in sorted(combinations, key=sorted):
            yield _block_rows(part, [p for p in fields_of if fields_of[p] == fields], fields, partial=True)
    if done:
        common = frozenset.intersection(*combinations) if combinations else frozenset()
        yield _block_rows(part, list(fields_of), common, tombstones=tombstones, dead=dead)
    elif dead:
        yield BlockRows(partition=part.name, ids=[], dead=dead, partial=True), ()


def _block_rows(part: RunPartition, ids: list[int], fields: Iterable[str], **rest: Any) -> Entry:
    heads, buffers = pack_columns(part.store.read(ids, sorted(fields)))
    return BlockRows(partition=part.name, ids=ids, columns=heads, **rest), buffers
