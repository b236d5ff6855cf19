"""What a journal says: which requests leave a record, how an engine is brought back from them, and its summary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import msgspec

from xtoken_core.queue.engine import Engine, Touched
from xtoken_core.queue.partition import Partition
from xtoken_core.queue.run.protocol import TRAINER, RunProtocol, teacher_task
from xtoken_core.queue.sessions import Session
from xtoken_core.queue.tasks.samples import Sample, Status
from xtoken_core.wire import Column, ColumnHead, pack_columns, unpack_columns
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import Buffer

ROWS = 256
OWNER = "journal"


class Record(msgspec.Struct, tag_field="type", omit_defaults=True, kw_only=True):
    """Something that happened in a partition."""

    partition: str


class Opened(Record, tag="opened", kw_only=True):
    """It was opened."""

    definition: m.OpenPartition


class Sealed(Record, tag="sealed", kw_only=True):
    """Nothing will be put any more."""


class Cleared(Record, tag="cleared", kw_only=True):
    """Samples were forgotten, or everything was."""

    ids: list[int] = []
    everything: bool = False


class Rows(Record, tag="rows", kw_only=True):
    """Columns came for ids; `sizes` are those of the buffers. `task` is done with them by that, if named.

    `gone` are those that every task has done by it, one of them with a result that only a session vouched for.
    """

    ids: list[int]
    columns: list[ColumnHead] = []
    sizes: list[int] = []
    task: str = ""
    gone: list[int] = []


class BlockRows(Record, tag="block_rows", kw_only=True):
    """A block of a run was put."""

    ids: list[int]
    tombstones: dict[int, str] = {}
    columns: list[ColumnHead] = []
    sizes: list[int] = []


class Done(Record, tag="done", kw_only=True):
    """A task has done samples; `gone` as in `Rows`."""

    task: str
    ids: list[int]
    gone: list[int] = []


class Refused(Record, tag="refused", kw_only=True):
    """Samples were refused, `times` times."""

    ids: list[int]
    reason: str
    times: int = 1


class BlockRefused(Record, tag="block_refused", kw_only=True):
    """A block of a run was refused, `times` times."""

    block: int
    reason: str
    times: int = 1


class AtStep(Record, tag="at_step", kw_only=True):
    """A run stands at a step: it was rewound there, or, with `acked`, the step before was taken."""

    step: int
    acked: bool = False
    skipped: dict[int, str] = {}
    dead: dict[int, str] = {}


class GivenUp(Record, tag="given_up", kw_only=True):
    """A run was given up."""

    reason: str


class Finished(Record, tag="finished", kw_only=True):
    """Ids that are done by every task, as half-open intervals."""

    intervals: list[tuple[int, int]]


AnyRecord = Opened | Sealed | Cleared | Rows | BlockRows | Done | Refused | BlockRefused | AtStep | GivenUp | Finished
Entry = tuple[Record, Sequence[Buffer]]
_decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)


def decode(head: Buffer) -> Record:
    """A record from its head.

    Raises:
        msgspec.MsgspecError: It is none.
    """
    return _decoder.decode(head)


def split(head: Record, body: memoryview) -> list[memoryview]:
    """The buffers of a record's columns.

    Raises:
        ValueError: They are not as long as the head says.
    """
    sizes = head.sizes if isinstance(head, (Rows, BlockRows)) else []
    if sum(sizes) != body.nbytes:
        raise ValueError(f"{body.nbytes} bytes of columns where {sum(sizes)} are meant")
    buffers, at = [], 0
    for size in sizes:
        buffers.append(body[at : at + size])
        at += size
    return buffers


# From requests to records


def record_of(engine: Engine, request: m.Request, buffers: Sequence[Buffer], touched: Touched) -> Entry | None:
    """What an answered request leaves in the journal; None if nothing that outlives the process."""
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
        case m.Complete() if part.run is None:
            return _complete(part, request, buffers, touched)
        case m.Ack():
            ids = list(touched.ids)
            return (Done(partition=name, task=request.task, ids=ids, gone=_gone(part, ids)), ()) if ids else None
        case m.Nack():
            return _nack(part, request, touched)
        case m.AckWindow() if part.run is not None:
            return AtStep(partition=name, step=part.run.cursor, acked=True), ()
        case m.Rewind():
            return AtStep(partition=name, step=request.step, skipped=request.skipped, dead=request.dead), ()
        case m.Giveup():
            return GivenUp(partition=name, reason=request.reason), ()
    return None


def _put(part: Partition, request: m.Put, buffers: Sequence[Buffer]) -> Entry:
    heads, kept, sizes = _durable(part, unpack_columns(request.columns, buffers))
    if request.lease is None:
        return Rows(partition=part.name, ids=request.ids, columns=heads, sizes=sizes), kept
    return BlockRows(
        partition=part.name, ids=request.ids, tombstones=request.tombstones, columns=heads, sizes=sizes
    ), kept  # fmt: skip


def _complete(part: Partition, request: m.Complete, buffers: Sequence[Buffer], touched: Touched) -> Entry:
    columns = unpack_columns(request.columns, buffers)
    heads, kept, sizes = _durable(part, columns)
    task = touched.task if part.volatile.isdisjoint(columns) else ""
    ids, gone = list(touched.ids), _gone(part, touched.ids)
    return Rows(partition=part.name, ids=ids, columns=heads, sizes=sizes, task=task, gone=gone), kept


def _gone(part: Partition, ids: Sequence[int]) -> list[int]:
    """What is finished, where a replay could not tell: a task's work may be left out there, see `Partition.vouch`."""
    return [i for i in ids if i in part.samples.finished] if part.volatile else []


def _nack(part: Partition, request: m.Nack, touched: Touched) -> Entry | None:
    if touched.block is not None:
        return BlockRefused(partition=part.name, block=touched.block, reason=request.reason), ()
    ids = sorted(set(touched.ids).intersection(request.ids))
    return (Refused(partition=part.name, ids=ids, reason=request.reason), ()) if ids else None


def _durable(part: Partition, columns: dict[str, Column]) -> tuple[list[ColumnHead], list[memoryview], list[int]]:
    heads, buffers = pack_columns({name: column for name, column in columns.items() if name not in part.volatile})
    return heads, buffers, [buffer.nbytes for buffer in buffers]


# From records to an engine


def apply(engine: Engine, entries: Iterable[Entry]) -> int:
    """Bring an empty engine to where the records lead; returns how many there were.

    Raises:
        QueueError: A record does not fit what came before it.
    """
    owner = Session(id=OWNER, name=OWNER, role=TRAINER, incarnation=0, rank=0, silence=1e9, last_seen=engine.clock())
    engine.sessions.open(owner)
    count = 0
    for head, buffers in entries:
        _apply(engine, head, buffers)
        count += 1
    engine.sessions.end(OWNER, "recovered")
    engine.sessions.ended.pop(OWNER, None)
    for part in engine.partitions.values():
        part.samples.line_up()
        held = frozenset[str]().union(*(sample.fields for sample in part.samples.samples.values()))
        part.kinds = {name: kind for name, kind in part.kinds.items() if name in held}
    return count


def _apply(engine: Engine, head: Record, buffers: Sequence[Buffer]) -> None:
    if isinstance(head, Opened):
        engine.partitions.setdefault(head.partition, Partition(head.definition, engine.sessions))
        return
    part = engine.partitions[head.partition]
    if part.run is not None:
        _apply_to_run(part, part.run, head, buffers)
    else:
        _apply_to_samples(part, head, buffers)


def _apply_to_samples(part: Partition, head: Record, buffers: Sequence[Buffer]) -> None:
    samples = part.samples
    match head:
        case Sealed():
            part.sealed = True
        case Cleared(everything=True):
            part.start_over()
        case Cleared():
            part.forget(head.ids)
        case Rows():
            columns = unpack_columns(head.columns, buffers)
            part.keep(head.ids, columns, samples.produce(head.ids, columns))
            if head.task:
                part.let_go(samples.finish(head.task, head.ids))
            part.forget(head.gone)
        case Done():
            part.let_go(samples.finish(head.task, head.ids))
            part.forget(head.gone)
        case Refused():
            for sample in (samples.samples[i] for i in head.ids if i in samples.samples):
                sample.attempts += head.times
                if sample.attempts >= samples.max_attempts:
                    samples.bury(sample.id, head.reason)
        case Finished():
            for start, stop in head.intervals:
                samples.finished.add(start, stop)


def _apply_to_run(part: Partition, run: RunProtocol, head: Record, buffers: Sequence[Buffer]) -> None:
    match head:
        case BlockRows():
            columns = unpack_columns(head.columns, buffers)
            block = min([*head.ids, *head.tombstones]) // run.source.block_size
            lease = run.source.lease(run.samples.next_lease_id(), OWNER, block)
            part.keep(head.ids, columns, run.put_block(OWNER, lease.id, head.ids, head.tombstones, columns))
        case BlockRefused():
            for _ in range(head.times):
                lease = run.source.lease(run.samples.next_lease_id(), OWNER, head.block)
                run.refuse_block(OWNER, lease.id, head.reason)
        case Refused():
            for sample_id in head.ids * head.times:
                if sample_id in run.samples.samples and sample_id not in run.samples.dead:
                    claim = run.samples.claim_ids(OWNER, teacher_task(0), [sample_id])
                    if claim is not None:
                        run.refuse(OWNER, claim.id, [sample_id], head.reason)
        case AtStep(acked=True):
            part.let_go(run.rewind(OWNER, head.step, dict(run.skipped), dict(run.samples.dead)))
        case AtStep():
            part.let_go(run.rewind(OWNER, head.step, head.skipped, head.dead))
        case GivenUp():
            run.give_up(head.reason)


# An engine in records


def snapshot(engine: Engine) -> Iterator[Entry]:
    """The fewest records that lead to where an engine stands, leases, sessions and volatile fields left out."""
    for part in engine.partitions.values():
        yield Opened(partition=part.name, definition=part.definition), ()
        yield from _run_in_records(part, part.run) if part.run is not None else _samples_in_records(part)


def _samples_in_records(part: Partition) -> Iterator[Entry]:
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
        sizes = [buffer.nbytes for buffer in buffers]
        yield Rows(partition=part.name, ids=some, columns=heads, sizes=sizes), buffers


def _refusals(part: Partition, held: Iterable[Sample]) -> Iterator[Entry]:
    for sample in held:
        if sample.attempts:
            reason = part.samples.dead.get(sample.id, "")
            yield Refused(partition=part.name, ids=[sample.id], reason=reason, times=sample.attempts), ()


def _run_in_records(part: Partition, run: RunProtocol) -> Iterator[Entry]:
    name, start = part.name, run.cursor * run.samples_per_step
    skipped = {p: reason for p, reason in run.skipped.items() if p < start}
    dead = {p: reason for p, reason in run.samples.dead.items() if p < start}
    yield AtStep(partition=name, step=run.cursor, skipped=skipped, dead=dead), ()
    for first, stop in run.source.done.intervals():
        for block in range(max(first, start // run.source.block_size), stop):
            yield from _block(part, run, block)
    for block, times in run.source.refused.items():
        if block not in run.source.done:
            yield BlockRefused(partition=name, block=block, reason="", times=times), ()
    yield from _refusals(part, [s for s in run.samples.samples.values() if s.id >= start])
    if run.failed:
        yield GivenUp(partition=name, reason=run.failed), ()


def _block(part: Partition, run: RunProtocol, block: int) -> Iterator[Entry]:
    positions = range(*run.source.bounds(block))
    ids = [p for p in positions if p in run.samples.samples]
    tombstones = {p: run.skipped[p] for p in positions if p in run.skipped and p not in run.samples.samples}
    if len(ids) + len(tombstones) < len(positions):
        reason = next((run.samples.dead[p] for p in positions if p in run.samples.dead), "")
        yield BlockRefused(partition=part.name, block=block, reason=reason, times=run.samples.max_attempts), ()
        return
    held = [run.samples.samples[p].fields for p in ids]
    fields = sorted(frozenset.intersection(*held) - set(run.signals)) if held else []
    heads, buffers = pack_columns(part.store.read(ids, fields))
    sizes = [buffer.nbytes for buffer in buffers]
    yield BlockRows(partition=part.name, ids=ids, tombstones=tombstones, columns=heads, sizes=sizes), buffers
