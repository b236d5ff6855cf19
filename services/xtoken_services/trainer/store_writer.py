"""A writer of a store: stands where a trainer does in a run, and writes what a teacher sends instead of training.

The teacher's process, its ring and the queue's protocol are those of any run. A step's records are kept only once
`check_step` has confirmed that no signal was lost while they were read.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from xtoken_core import schema
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.data_plane.buffers import array_of
from xtoken_core.dataset import Record
from xtoken_core.plan import MicroBatch
from xtoken_core.queue.run.names import TRAINER
from xtoken_core.served_requests import RequestCounts, take_requests
from xtoken_core.teacher_store import codec
from xtoken_core.teacher_store.identity import identity_of
from xtoken_core.teacher_store.shards import ALWAYS, ShardWriter, Skip, digest_of
from xtoken_core.teacher_store.store import TeacherStore, parts_of
from xtoken_core.wire import Column
from xtoken_core.wire.messages import Claimed
from xtoken_services.common.batches.step_plan import StepPlan, plan_fields, plan_step
from xtoken_services.common.models.loading import pick_device
from xtoken_services.common.processes.worker import WAIT_S, QueueLink, StopRequested, Worker, worker_session
from xtoken_services.common.stores.teacher_stores import skip_condition
from xtoken_services.common.text.collation import open_data
from xtoken_services.common.text.run_order import record_of
from xtoken_services.trainer.distributed import RankGroup
from xtoken_services.trainer.jsonl import JsonLines
from xtoken_services.trainer.node_reduce import StepOutcome, step_outcome
from xtoken_services.trainer.rings import TeacherRings

log = logging.getLogger("xtoken.store")

SHARD_BYTES = 64 << 20
FLUSH_S = 60.0
"""Seconds after which records are written although they do not fill a shard: a killed writer loses no more work."""
THREADS = 4


class Row(NamedTuple):
    """One record as it came from the teacher.

    Attributes:
        record: Its number.
        digest: Of its token ids.
        values: `[tokens, width]`.
    """

    record: int
    digest: str
    values: np.ndarray


class Frame(NamedTuple):
    """One record as it is stored.

    Attributes:
        record: Its number.
        tokens: Its tokens.
        digest: Of their ids.
        data: Its frame.
    """

    record: int
    tokens: int
    digest: str
    data: bytes


def work(link: QueueLink, *, rank: int, name: str | None, store: str) -> None:
    """Write one rank's part of a store.

    Args:
        link: The queue.
        rank: Number of this rank.
        name: The worker's name; None: from its rank.
        store: Directory or address of the store.

    Raises:
        StoreError: The store was built from something else.
        OutputError: It cannot be written.
    """
    group = RankGroup.of_environment()
    try:
        with worker_session(link, role=TRAINER, name=name or f"trainer-{rank}", rank=rank) as worker:
            group = group or RankGroup(rank, worker.run.world)
            group.beat = worker.beat
            device = pick_device(worker.run.spec.workers.device, rank)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            rings = TeacherRings(worker, device)
            try:
                StoreWriterLoop(worker, rings, group, store, rank=rank).write()
            finally:
                rings.close()
    finally:
        if group is not None:
            group.close()


def first_step(store: TeacherStore, run: ResolvedRun) -> int:
    """Return the first step of a build of which a record is neither stored nor skipped; that after the last if none is.

    Args:
        store: The store.
        run: The build.
    """
    condition = skip_condition(run, 0)
    for position in range(run.positions):
        if store.missing([record_of(run, position)], condition, older=False):
            return position // run.spec.train.samples_per_step
    return run.steps


class StoreWriterLoop:
    """One rank's loop over the steps of a build.

    Args:
        worker: The session.
        rings: The teacher's ring.
        group: All ranks.
        store: Directory or address of the store.
        rank: Number of this rank.
    """

    def __init__(self, worker: Worker, rings: TeacherRings, group: RankGroup, store: str, *, rank: int) -> None:
        self.worker, self.queue, self.run = worker, worker.queue, worker.run
        self.rings, self.group, self.rank = rings, group, rank
        self.store = TeacherStore.create(store, identity_of(self.run, 0))
        self.shard = ShardWriter(self.store.files, SHARD_BYTES)
        same = self.run.same_tokenizer[0]
        self.ids_field = schema.INPUT_IDS.name if same else schema.field_name(schema.TEACHER_INPUT_IDS, 0)
        self.known = set(self.store.entries)
        self.condition = skip_condition(self.run, 0)
        self.lines = JsonLines(self.run.spec.output / "steps.jsonl")
        self.pool = ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="store")
        self.rewinds = self.step = 0
        self.written_at = time.monotonic()
        self.written_bytes = 0
        self.requests = RequestCounts()

    def write(self) -> None:
        """Write every record that the store lacks.

        Raises:
            OutputError: The store cannot be written.
            StopRequested: The process was asked to stop; what it has was written.
        """
        self.step = self.group.broadcast(first_step(self.store, self.run))
        if self.group.is_leader:
            self.lines.truncate(self.step, inclusive=False)
        self._rewind()
        self.worker.phase("run")
        try:
            while self.step < self.run.steps:
                self._one_step()
        finally:
            self.pool.shutdown(cancel_futures=True)
            self._flush()
        self.group.barrier()

    def _one_step(self) -> None:
        began = time.monotonic()
        step = self._window()
        frames, stopped = self._frames(step)
        self.rings.drain()
        redo = stopped or self.queue.check_step(step.step, step.dead, rewinds=self.rewinds)
        redo, stops = self.group.any_of(redo, stopped or self.worker.stopping.is_set())
        if redo:
            if stops:
                raise StopRequested
            log.warning("repeating step %d: a teacher or a sample was lost during it", step.step)
            self._rewind()
            return
        outcome = step_outcome(step, self.group, self.queue)
        for frame in frames:
            self.known.add(frame.record)
            self.shard.add(*frame)
        if self.group.is_leader:
            self._skip({record_of(self.run, position): why for position, why in outcome.skipped.items()})
        if self.step + 1 == self.run.steps:
            self._flush()
        # Every rank's records of the last step are on disk before the queue reports the run as done.
        self.group.barrier()
        if self.group.is_node_leader:
            self.queue.ack_window(step.step, rewinds=self.rewinds)
        self.step += 1
        if self.shard.is_full or time.monotonic() - self.written_at > FLUSH_S:
            self._flush()
        self.worker.beat(1)
        self._log_step(step, outcome, frames, time.monotonic() - began)
        if stops:
            raise StopRequested

    def _skip(self, reasons: Mapping[int, str]) -> None:
        """Add records without a row: templates of other runs may take conversations, no run takes other records."""
        if not reasons:
            return
        for record in open_data(self.worker).read(list(reasons)):
            by_template = isinstance(record, Record) and "messages" in record.value
            self.shard.skip(record.number, Skip(reasons[record.number], self.condition if by_template else ALWAYS))

    def _window(self) -> StepPlan:
        """Return the plan of the next step; all ranks get one, or all stop.

        Raises:
            StopRequested: Some rank was asked to stop.
        """
        plan: StepPlan | None = None
        try:
            while plan is None:
                self.worker.alive()
                rows = self.queue.window(self.step, plan_fields(self.run), rewinds=self.rewinds, wait_s=WAIT_S)
                plan = plan_step(self.run, self.step, rows) if rows is not None else None
        except StopRequested:
            plan = None
        if self.group.any(plan is None) or plan is None:
            raise StopRequested
        return plan

    def _frames(self, step: StepPlan) -> tuple[list[Frame], bool]:
        """Return the frames of this rank's records of a step that the store lacks, and whether it was asked to stop."""
        made = []
        try:
            for batch in step.plan.ranks[self.rank]:
                if batch.ids:
                    made += [self.pool.submit(self._frame, row) for row in self._rows(batch)]
                    self.worker.beat(1)
        except StopRequested:
            return [], True
        return [future.result() for future in made], False

    def _frame(self, row: Row) -> Frame:
        parts = (np.ascontiguousarray(part) for part in parts_of(row.values, self.store.identity))
        return Frame(row.record, len(row.values), row.digest, codec.pack(parts))

    def _rows(self, batch: MicroBatch) -> Iterator[Row]:
        """Yield the records of a micro-batch that the store lacks; its slot is released before."""
        claimed, columns = self._claim(batch)
        self.requests = self.requests.plus(take_requests(columns, [0]))
        if not claimed.slots or set(claimed.dead).issuperset(batch.ids):
            return
        (slot,) = claimed.slots
        signal = dict(columns)
        self.rings.receive(claimed.slots, signal)
        values = array_of(self.rings.values(slot, batch.rows, batch.widths[1]))
        self.rings.release(claimed.slots)
        column = columns[self.ids_field]
        assert column.offsets is not None
        offsets = column.offsets.tolist()
        for row, (position, (start, stop)) in enumerate(zip(batch.ids, itertools.pairwise(offsets), strict=True)):
            record = record_of(self.run, position)
            if position in claimed.dead or record in self.known:
                continue
            of_record = values[0, start:stop] if batch.packed else values[row, : stop - start]
            yield Row(record, digest_of(column.values[8 * start : 8 * stop]), of_record)

    def _claim(self, batch: MicroBatch) -> tuple[Claimed, dict[str, Column]]:
        while True:
            self.worker.alive()
            self.rings.poll()
            claim = self.queue.claim_batch(batch.ids, [self.ids_field], rewinds=self.rewinds, wait_s=WAIT_S)
            if claim is not None:
                return claim

    def _rewind(self) -> None:
        rewinds = self.queue.rewind(self.step, {}, {}) if self.group.is_node_leader else 0
        self.rewinds = self.group.broadcast_in_node(rewinds)

    def _flush(self) -> None:
        self.written_bytes += self.shard.flush()
        self.written_at = time.monotonic()

    def _log_step(self, step: StepPlan, outcome: StepOutcome, frames: Sequence[Frame], seconds: float) -> None:
        counts = [[frame.tokens, len(frame.data)] for frame in frames]
        totals = [sum(column) for column in zip(*counts, strict=True)] or [0, 0]
        ranks = self.group.all_gather(totals)
        if not self.group.is_leader:
            return
        tokens, nbytes = (sum(column) for column in zip(*ranks, strict=True))
        self.lines.append(
            {
                "step": step.step,
                "ids": list(outcome.ids),
                "tokens": tokens,
                "store_bytes": nbytes,
                "time": round(time.time(), 6),
                "seconds": round(seconds, 6),
                "tokens_per_second": round(tokens / seconds, 3),
                **(self.requests.of_servers() if self.run.spec.teacher[0].url else {}),
                "skipped": list(outcome.skipped),
                "dead": list(outcome.dead),
            }
        )
        self.requests = RequestCounts()
