"""`xtoken store write`: one rank's part of a store's build, a loop over the records that the store lacks.

Records are read, tokenized as in a run, planned into a step's micro-batches, and the teacher's output is appended to a
shard. Nothing but the store says what is done, so that a killed writer is just started again.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from setproctitle import setproctitle

from xtoken_core import schema
from xtoken_core.config.resolved import ResolvedRun, parse_resolved_run
from xtoken_core.data_plane.buffers import array_of
from xtoken_core.data_plane.run_client import StepRows
from xtoken_core.dataset import Record
from xtoken_core.errors import InputError, XtokenError, os_errors_as
from xtoken_core.plan import MicroBatch
from xtoken_core.regular_files import JSON_LIMIT, read_regular
from xtoken_core.teacher_store import codec
from xtoken_core.teacher_store.identity import identity_of
from xtoken_core.teacher_store.shards import ALWAYS, Skip, digest_of
from xtoken_core.teacher_store.store import TeacherStore, parts_of
from xtoken_core.teacher_store.writing import ShardWriter
from xtoken_core.wire import Column
from xtoken_core.wire.columns import select_rows
from xtoken_services.common.batches.step_plan import plan_step, ring_shape
from xtoken_services.common.files.jsonl import JsonLines
from xtoken_services.common.processes.worker import StopRequested, set_by_signals
from xtoken_services.common.stores import SIGN_OF_LIFE
from xtoken_services.common.stores.store_records import missing_steps
from xtoken_services.common.stores.teacher_stores import skip_condition
from xtoken_services.common.text.collation import collate_positions, make_collator, open_data, row_counts
from xtoken_services.common.text.run_order import record_of
from xtoken_services.teacher.base import RefusedSamplesError, Teacher, TeacherBatch
from xtoken_services.teacher.held_out import measure_held_out
from xtoken_services.teacher.opening import opened_teacher

log = logging.getLogger("xtoken.store")

SHARD_BYTES = 64 << 20
FLUSH_S = 60.0
"""Seconds after which records are written although they do not fill a shard: a killed writer loses no more work."""
THREADS = 4


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


def work(run_file: Path, store: str, *, rank: int) -> None:
    """Write one rank's part of a store; SIGTERM and SIGINT end it after a micro-batch, with what it has written.

    Args:
        run_file: The build, resolved.
        store: Directory or address of the store.
        rank: Number of this rank.

    Raises:
        InputError: The text has changed or has a bad record, the store was built from something else, or the teacher
            cannot be opened.
        OutputError: The store cannot be written.
        XtokenError: The teacher refuses more records than `queue.max_dead`.
    """
    setproctitle(f"xtoken writer-{rank}")
    stopping = set_by_signals()

    with os_errors_as(InputError, f"cannot read the run file {run_file}"):
        run = parse_resolved_run(read_regular(run_file, JSON_LIMIT), source=str(run_file))
    report = reporter(run.spec.output / SIGN_OF_LIFE.format(rank=rank), stopping)
    try:
        with opened_teacher(run, 0, rank, report) as teacher:
            target = TeacherStore.create(store, identity_of(run, 0))
            if rank == 0 and (measured := measure_held_out(run, 0, teacher, report)):
                name, result = measured
                target.files.write(name, json.dumps(result).encode())
            StoreWriter(run, target, teacher, rank=rank).write()
    except StopRequested:
        log.info("stopped")
        # Ended by the signal, and not with status 0: the supervisor must not take this rank for done.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def reporter(sign: Path, stopping: threading.Event) -> Callable[[str], None]:
    """Return a teacher's `report`, which changes a file when there is progress: a new text, or an empty one.

    Args:
        sign: The file.
        stopping: Set to end the teacher's wait with `StopRequested`.
    """
    last = ""

    def report(activity: str) -> None:
        nonlocal last
        if stopping.is_set():
            raise StopRequested
        if not activity or activity != last:
            sign.write_text(str(time.monotonic_ns()))
        last = activity

    return report


class StoreWriter:
    """One rank's loop over the steps of a build.

    Args:
        run: The build.
        store: The store.
        teacher: The teacher.
        rank: Number of this rank.
    """

    def __init__(self, run: ResolvedRun, store: TeacherStore, teacher: Teacher, *, rank: int) -> None:
        self.run, self.store, self.teacher, self.rank = run, store, teacher, rank
        self.shard = ShardWriter(store.files, SHARD_BYTES)
        same = run.same_tokenizer[0]
        self.ids_field = schema.INPUT_IDS.name if same else schema.field_name(schema.TEACHER_INPUT_IDS, 0)
        self.collator, self.index, self.counts = make_collator(run), open_data(run), row_counts(run)
        self.lines = JsonLines(run.spec.output / "steps.jsonl")
        self.pool = ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="store")
        self.written_at = time.monotonic()
        self.dead: set[int] = set()

    def write(self) -> None:
        """Write every record of this rank's that the store lacks; if it is stopped, what it has is written.

        Raises:
            OutputError: The store cannot be written.
            StopRequested: The process was asked to stop.
        """
        steps = missing_steps(self.run, self.store)[self.rank]
        try:
            for number, positions in enumerate(steps):
                self._write_step(positions, left=len(steps) - number - 1)
        finally:
            self.pool.shutdown(cancel_futures=True)
            self.shard.flush()

    def _write_step(self, positions: Sequence[int], *, left: int) -> None:
        began = time.monotonic()
        ids, columns, skipped = collate_positions(self.run, self.collator, self.index, self.counts, positions)
        step = plan_step(self.run, 0, StepRows(ids, [], [], columns))
        row_of = {position: row for row, position in enumerate(ids)}
        made = []
        for batch in itertools.chain(*step.plan.ranks):
            if batch.ids:
                rows = select_rows(columns[self.ids_field], [row_of[position] for position in batch.ids])
                made += [self.pool.submit(self._frame, *part) for part in self._outputs(batch, rows)]
        frames = [future.result() for future in made]
        for frame in frames:
            self.shard.add(*frame)
        self._skip({record_of(self.run, position): why for position, why in skipped.items()})
        if not left or self.shard.is_full or time.monotonic() - self.written_at > FLUSH_S:
            self.shard.flush()
            self.written_at = time.monotonic()
        self._log_step(positions, frames, list(skipped), time.monotonic() - began, left)

    def _outputs(self, batch: MicroBatch, column: Column) -> Iterator[tuple[int, memoryview, np.ndarray]]:
        """Yield the records of a micro-batch: number, token ids and the teacher's output `[tokens, width]`."""
        shape, width = ring_shape(self.run, 0), batch.widths[1]
        memory = torch.empty(
            batch.rows, width, shape.width, dtype=getattr(torch, shape.dtype), device=self.teacher.device
        )
        while True:
            self.teacher.report("")
            made = TeacherBatch.of(batch, (self.ids_field, column), width, self.teacher.pad_id, self.dead)
            try:
                self.teacher.write(made, memory)
                break
            except RefusedSamplesError as error:
                self._give_up(error)
        values, offsets = array_of(memory.cpu()), column.offsets
        assert offsets is not None
        for row, (position, (at, part)) in enumerate(zip(batch.ids, made.parts(), strict=True)):
            if position not in self.dead:
                ids = column.values[8 * offsets[row] : 8 * offsets[row + 1]]
                yield record_of(self.run, position), ids, values[at, part]

    def _give_up(self, error: RefusedSamplesError) -> None:
        """Leave out records that the teacher refuses, up to the limit of dead letters.

        Raises:
            XtokenError: They are more.
        """
        self.dead |= set(error.samples)
        records = ", ".join(str(record_of(self.run, position)) for position in error.samples)
        log.warning("records %s of the text are left out: %s", records, error)
        allowed = self.run.spec.queue.max_dead
        if len(self.dead) > allowed:
            raise XtokenError(f"the teacher refuses {len(self.dead)} records, {allowed} are allowed: {error}")

    def _frame(self, record: int, ids: memoryview, values: np.ndarray) -> Frame:
        parts = (np.ascontiguousarray(part) for part in parts_of(values, self.store.identity))
        return Frame(record, len(values), digest_of(ids), codec.pack(parts))

    def _skip(self, reasons: Mapping[int, str]) -> None:
        """Add records without a row: other runs' templates may take conversations, and their routes other records."""
        condition = skip_condition(self.run, 0) if reasons else ""
        for record in self.index.read(list(reasons)):
            by_run = isinstance(record, Record) and ("messages" in record.value or self.run.routes is not None)
            self.shard.skip(record.number, Skip(reasons[record.number], condition if by_run else ALWAYS))

    def _log_step(
        self, positions: Sequence[int], frames: Sequence[Frame], skipped: list[int], seconds: float, left: int
    ) -> None:
        requests = self.teacher.new_requests()
        tokens = sum(frame.tokens for frame in frames)
        seconds /= self.run.spec.workers.ranks  # of all ranks, if they are equally fast
        self.lines.append(
            {
                "rank": self.rank,
                "left": left,
                "ids": [position for position in positions if position not in skipped],
                "tokens": tokens,
                "store_bytes": sum(len(frame.data) for frame in frames),
                "time": round(time.time(), 6),
                "seconds": round(seconds, 6),
                "tokens_per_second": round(tokens / seconds, 3),
                **(requests.of_servers() if requests is not None else {}),
                "skipped": skipped,
                "dead": sorted(self.dead.intersection(positions)),
            }
        )
