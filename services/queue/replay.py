"""Replay of the write-ahead log: records to an engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

from services.queue.log_records import (
    AtStep,
    BlockRefused,
    BlockRows,
    Cleared,
    Done,
    Entry,
    Finished,
    GivenUp,
    Opened,
    Record,
    Refused,
    Rows,
    Sealed,
)
from xtoken_core.errors import InputError
from xtoken_core.queue.budget import cost_of_definition
from xtoken_core.queue.engine import Engine, new_partition
from xtoken_core.queue.partition import Partition
from xtoken_core.queue.run.names import TRAINER
from xtoken_core.queue.run.partition import RunPartition
from xtoken_core.queue.run.protocol import RunProtocol
from xtoken_core.queue.sessions import Session
from xtoken_core.queue.tasks.partition import TaskPartition
from xtoken_core.wire import Column, QueueError, unpack_columns
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import Buffer

log = logging.getLogger("xtoken.queue.journal")

OWNER = "journal"


class Source(Protocol):
    """Records of a segment."""

    number: int

    def __iter__(self) -> Iterator[Entry]: ...

    def misfit(self, why: str) -> InputError:
        """Return the error about the record that was read last."""
        ...


def apply(engine: Engine, source: Source) -> int:
    """Replay records into an empty engine; return their number. Rows that no column can have are logged and left out.

    Raises:
        InputError: A record contradicts those before it.
    """
    owner = Session(id=OWNER, name=OWNER, role=TRAINER, incarnation=0, rank=0, silence=1e9, last_seen=engine.clock())
    engine.sessions.open(owner)
    count = 0
    for head, buffers in source:
        try:
            _apply(engine, head, buffers)
        except _BadRowsError as error:
            log.error("%s", source.misfit(f"is left out: samples {error.ids} of partition {head.partition!r}: {error}"))
        except (QueueError, LookupError, ValueError, TypeError, ArithmeticError) as error:
            raise source.misfit(f"contradicts those before it: {error}") from error
        count += 1
    engine.sessions.end(OWNER, "recovered")
    engine.charge_partitions()
    engine.sessions.ended.pop(OWNER, None)
    for part in engine.partitions.values():
        if isinstance(part, TaskPartition):
            part.samples.rebuild_ready_queues()
        held = frozenset[str]().union(*(sample.fields for sample in part.samples.samples.values()))
        part.kinds = {name: kind for name, kind in part.kinds.items() if name in held}
    return count


class _BadRowsError(Exception):
    """Columns of a record are not valid."""

    def __init__(self, ids: Sequence[int], error: QueueError) -> None:
        super().__init__(str(error))
        self.ids = list(ids[:8])


def _columns_of(part: Partition, head: Rows | BlockRows, buffers: Sequence[Buffer]) -> dict[str, Column]:
    try:
        columns = unpack_columns(head.columns, buffers)
        part.check(columns, len(head.ids))
    except QueueError as error:
        raise _BadRowsError(head.ids, error) from error
    return columns


def _apply(engine: Engine, head: Record, buffers: Sequence[Buffer]) -> None:
    if isinstance(head, Opened):
        if head.partition != head.definition.partition:
            raise ValueError(f"partition {head.partition!r} is opened as {head.definition.partition!r}")
        if head.partition not in engine.partitions:
            engine.partitions[head.partition] = new_partition(head.definition, engine.sessions)
            engine.budget.add("partitions", cost_of_definition(head.definition))
        return
    part = engine.partitions.get(head.partition)
    if isinstance(part, RunPartition):
        _apply_to_run(part, head, buffers)
    elif isinstance(part, TaskPartition):
        _apply_to_tasks(part, head, buffers)
    else:
        raise ValueError(f"there is no partition {head.partition!r}")


def _apply_to_tasks(part: TaskPartition, head: Record, buffers: Sequence[Buffer]) -> None:
    samples = part.samples
    match head:
        case Sealed():
            part.sealed = True
        case Cleared(everything=True):
            part.reset()
        case Cleared():
            part.drop(head.ids)
        case Rows():
            columns = _columns_of(part, head, buffers)
            part.keep(head.ids, columns, samples.produce(head.ids, columns))
            if head.task:
                part.store.drop(samples.finish(head.task, head.ids))
            part.drop(head.gone)
        case Done():
            part.store.drop(samples.finish(head.task, head.ids))
            part.drop(head.gone)
        case Refused():
            for sample in (samples.samples[i] for i in head.ids if i in samples.samples):
                sample.attempts += head.times
                if sample.attempts >= samples.max_attempts:
                    samples.mark_dead(sample.id, head.reason)
        case Finished():
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


def _apply_to_run(part: RunPartition, head: Record, buffers: Sequence[Buffer]) -> None:
    run, to = part.run, {"id": OWNER, "session": OWNER, "partition": part.name}
    match head:
        case BlockRows():
            columns = _columns_of(part, head, buffers)
            first = min([*head.ids, *head.tombstones, *head.dead], default=-1)
            block = _check_block(run, first // run.blocks.block_size)
            part.keep(head.ids, columns, run.fill_block(block, head.ids, columns, head.tombstones, head.dead))
        case BlockRefused():
            block = _check_block(run, head.block)
            for _ in range(min(head.times, run.samples.max_attempts)):
                lease = run.blocks.lease(run.samples.next_lease_id(), OWNER, block)
                run.nack(m.Nack(**to, lease=lease.id, ids=[], reason=head.reason))
        case Refused():
            task = next(iter(run.samples.tasks))  # the first teacher's; without teachers, the trainer's
            for sample_id in head.ids * min(head.times, run.samples.max_attempts):
                if sample_id in run.samples.samples and sample_id not in run.samples.dead:
                    claim = run.samples.claim_ids(OWNER, task, [sample_id])
                    if claim is not None:
                        run.nack(m.Nack(**to, lease=claim.id, ids=[sample_id], reason=head.reason))
        case AtStep(acked=True):
            skipped, dead = dict(run.skipped), dict(run.samples.dead)
            part.rewind(m.Rewind(**to, step=head.step, skipped=skipped, dead=dead))
        case AtStep():
            part.rewind(m.Rewind(**to, step=head.step, skipped=head.skipped, dead=head.dead))
        case GivenUp():
            run.fail(head.reason)
