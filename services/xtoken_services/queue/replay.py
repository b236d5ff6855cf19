"""Replay of the write-ahead log: records to an engine."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence

import msgspec

from xtoken_core.queue.budget import cost_of_definition
from xtoken_core.queue.engine import Engine
from xtoken_core.queue.partition import Partition
from xtoken_core.queue.run.names import TRAINER
from xtoken_core.queue.run.partition import RunPartition
from xtoken_core.queue.run.protocol import RunProtocol
from xtoken_core.queue.sessions import Session
from xtoken_core.queue.tasks.partition import TaskPartition
from xtoken_core.wire import Column, QueueError, unpack_columns
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import Buffer
from xtoken_services.queue import log_records as r

log = logging.getLogger("xtoken.queue.journal")

OWNER = "journal"
MISFITS = (msgspec.MsgspecError, RecursionError, QueueError, LookupError, ValueError, TypeError, ArithmeticError)


def apply(engine: Engine, entries: Iterable[tuple[Buffer, Sequence[Buffer]]]) -> int:
    """Replay records into an empty engine; return their number. Rows that no column can have are logged and left out.

    Args:
        engine: Empty.
        entries: Head of each record, as its bytes, and the buffers of its columns.

    Raises:
        ValueError: A record is none of this version, or contradicts those before it.
    """
    owner = Session(id=OWNER, name=OWNER, role=TRAINER, incarnation=0, rank=0, silence=1e9, last_seen=engine.clock())
    engine.sessions.open(owner)
    number = 0
    for number, (encoded, buffers) in enumerate(entries, 1):
        try:
            head = r.decode(encoded)
            _apply(engine, head, buffers)
        except _BadRowsError as error:
            log.error("record %d is left out: samples %s of partition %r: %s", number, error.ids, head.partition, error)
        except MISFITS as error:
            raise ValueError(f"record {number} does not fit those before it: {error}") from error
    engine.sessions.end(OWNER, "recovered")
    engine.charge_partitions()
    engine.sessions.ended.pop(OWNER, None)
    for part in engine.partitions.values():
        if isinstance(part, TaskPartition):
            part.samples.rebuild_ready_queues()
        held = frozenset[str]().union(*(sample.fields for sample in part.samples.samples.values()))
        part.kinds = {name: kind for name, kind in part.kinds.items() if name in held}
    return number


class _BadRowsError(Exception):
    """Columns of a record are not valid."""

    def __init__(self, ids: Sequence[int], error: QueueError) -> None:
        super().__init__(str(error))
        self.ids = list(ids[:8])


def _columns_of(part: Partition, head: r.Rows | r.BlockRows, buffers: Sequence[Buffer]) -> dict[str, Column]:
    try:
        columns = unpack_columns(head.columns, buffers)
        # A record of a snapshot joins the rows of many puts, so there is no bound on its number of values.
        part.check(columns, len(head.ids), most_values=sys.maxsize)
    except QueueError as error:
        raise _BadRowsError(head.ids, error) from error
    return columns


def _apply(engine: Engine, head: r.Record, buffers: Sequence[Buffer]) -> None:
    if isinstance(head, r.Opened):
        if head.partition != head.definition.partition:
            raise ValueError(f"partition {head.partition!r} is opened as {head.definition.partition!r}")
        if head.partition not in engine.partitions:
            engine.partitions[head.partition] = engine.opens(head.definition, engine.sessions)
            engine.budget.add("partitions", cost_of_definition(head.definition))
        return
    part = engine.partitions.get(head.partition)
    if isinstance(part, RunPartition):
        _apply_to_run(part, head, buffers)
    elif isinstance(part, TaskPartition):
        _apply_to_tasks(part, head, buffers)
    else:
        raise ValueError(f"there is no partition {head.partition!r}")


def _apply_to_tasks(part: TaskPartition, head: r.Record, buffers: Sequence[Buffer]) -> None:
    samples = part.samples
    match head:
        case r.Sealed():
            part.sealed = True
        case r.Cleared(everything=True):
            part.reset()
        case r.Cleared():
            part.drop(head.ids)
        case r.Rows():
            columns = _columns_of(part, head, buffers)
            part.keep(head.ids, columns, samples.produce(head.ids, columns))
            if head.task:
                part.store.drop(samples.finish(head.task, head.ids))
            part.drop(head.gone)
        case r.Done():
            part.store.drop(samples.finish(head.task, head.ids))
            part.drop(head.gone)
        case r.Refused():
            samples.count_refusals(head.ids, head.reason, head.times)
        case r.Finished():
            for start, stop in head.intervals:
                samples.finished.add(start, stop)


def _check_block(run: RunProtocol, block: int) -> int:
    """Return a block's number.

    Raises:
        ValueError: The run has no such block. A later snapshot of one could not be read again.
    """
    first, stop = run.blocks.bounds(block)
    if not 0 <= first < stop:
        raise ValueError(f"the run has no block {block}")
    return block


def _apply_to_run(part: RunPartition, head: r.Record, buffers: Sequence[Buffer]) -> None:
    run = part.run
    match head:
        case r.BlockRows():
            columns = _columns_of(part, head, buffers)
            positions, routes = [*head.ids, *head.tombstones, *head.dead], part.routes_in(head.ids, columns)
            block = _check_block(run, min(positions, default=-1) // run.blocks.block_size)
            if not head.partial:
                new = run.fill_block(block, head.ids, columns, head.tombstones, head.dead, routes)
            elif max(positions) < run.blocks.bounds(block)[1]:
                new = run.admit(head.ids, columns, head.dead, routes)
            else:
                raise ValueError(f"position {max(positions)} is not in block {block}")
            part.keep(head.ids, columns, new)
        case r.BlockRefused():
            run.refuse_block(_check_block(run, head.block), head.reason, head.times)
        case r.Refused():
            run.mark_dead(run.samples.count_refusals(head.ids, head.reason, head.times), head.reason)
        case r.AtStep(acked=True):
            if head.step == run.cursor + 1:
                part.store.drop(run.advance())
            elif head.step != run.cursor:  # equal for an acknowledgement that was repeated
                raise ValueError(f"step {head.step} is not the one after step {run.cursor}")
        case r.AtStep():
            to = {"id": OWNER, "session": OWNER, "partition": part.name}
            part.rewind(m.Rewind(**to, step=head.step, skipped=head.skipped, dead=head.dead))
        case r.GivenUp():
            run.fail(head.reason)
