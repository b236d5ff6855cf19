"""`xtoken collator`: connect to a queue and collate blocks of its run until the run ends."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from xtoken_core.collate import CrossTokenizerCollator
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.dataset import TextIndex
from xtoken_core.queue.run.names import COLLATOR
from xtoken_core.teacher_store.identity import StoreError
from xtoken_core.teacher_store.store import MissingRecordError, TeacherStore
from xtoken_core.wire.messages import Block
from xtoken_services.common.files.jsonl import replace_file
from xtoken_services.common.processes.worker import QueueLink, Worker, worker_session
from xtoken_services.common.run.metric_lines import SAMPLE
from xtoken_services.common.stores.teacher_stores import open_store, skip_condition
from xtoken_services.common.text.collation import (
    BadRecordError,
    collate_positions,
    end_run,
    look_at_sample,
    make_collator,
    open_data,
    row_counts,
    serve_blocks,
)
from xtoken_services.common.text.run_order import record_of

log = logging.getLogger("xtoken.collator")


def work(link: QueueLink, *, name: str | None) -> None:
    """Collate until the run ends.

    Raises:
        ConfigError: The data differs from the data that the run was opened with.
        InputError: A tokenizer or the data cannot be read, or a record is bad and
            `on_bad_record` is "fail".
    """
    with worker_session(link, role=COLLATOR, name=name or "collator-0") as worker:
        worker.activity("loading tokenizers")
        loop = CollatorLoop(worker, make_collator(worker.run), open_data(worker.run))
        loop.look_at_sample()
        worker.phase("run")
        loop.serve()


def stores_to_skip(run: ResolvedRun) -> list[tuple[TeacherStore, str]]:
    """Return the stores whose missing records are skipped, each with the run's condition (`skip_condition`).

    The collator looks for these records before it makes a row.
    """
    teachers = enumerate(run.spec.teacher)
    numbers = [number for number, spec in teachers if spec.store and spec.store_missing == "skip"]
    return [(open_store(run, number), skip_condition(run, number)) for number in numbers]


class CollatorLoop:
    """The collator's main loop: lease a block, read, collate, put."""

    def __init__(self, worker: Worker, collator: CrossTokenizerCollator, index: TextIndex) -> None:
        self.worker, self.queue, self.run = worker, worker.queue, worker.run
        self.collator, self.index = collator, index
        self.counts = row_counts(self.run)
        self.stores = stores_to_skip(self.run)

    def look_at_sample(self) -> None:
        """Look at a sample of the run; the first collator stores what it has found.

        Raises:
            InputError: No record can be used.
            OutputError: The result cannot be written.
        """
        try:
            found = look_at_sample(self.run, self.collator, self.index, self.counts)
        except BadRecordError as error:
            end_run(self.worker, str(error))
        if self.run.group == 0 and self.worker.name.endswith("collator-0"):
            replace_file(self.run.spec.output / SAMPLE, json.dumps(found))

    def serve(self) -> None:
        """Collate until the run ends."""
        serve_blocks(self.worker, self._collate)

    def _collate(self, block: Block) -> None:
        positions = range(block.first, block.first + block.count)
        absent = self._missing([record_of(self.run, position) for position in positions])
        try:
            rows = collate_positions(self.run, self.collator, self.index, self.counts, positions, absent)
        except BadRecordError as error:
            end_run(self.worker, str(error))
        self.queue.put_block(block.lease, *rows)
        self.worker.alive(1)

    def _missing(self, records: Sequence[int]) -> dict[int, str]:
        """Return the records that are skipped for what a store does not have of them, with the reason.

        Raises:
            StoreError: A store cannot be read.
        """
        missing: dict[int, str] = {}
        for store, condition in self.stores:
            # A record that the build has skipped, under this run's condition, is refused by what refused it there.
            wanted = [n for n in records if not store.is_skipped(n, condition)]
            for record, frame in store.frames(wanted).items():
                if isinstance(frame, MissingRecordError):
                    missing.setdefault(record, str(frame))
                elif isinstance(frame, StoreError):
                    raise frame
        return missing
