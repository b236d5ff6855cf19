"""`xtoken collator`: connect to a queue and collate blocks of its run until the run ends."""

from __future__ import annotations

import logging
from typing import NoReturn

from services.common.resolve import open_index
from services.common.teacher_stores import open_store
from services.common.tokenizers import tokenizer_of
from services.common.worker import WAIT_S, QueueLink, Worker, worker_session
from xtoken_core.collate import CrossTokenizerCollator, loss_counts
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.dataset import BadRecord, DataIndex, record_at
from xtoken_core.errors import ConfigError, InputError
from xtoken_core.queue.run.names import COLLATOR, SUPERVISOR
from xtoken_core.teacher_store.store import MissingRecordError, TeacherStore
from xtoken_core.wire import QueueError
from xtoken_core.wire.messages import Block

log = logging.getLogger("xtoken.collator")

MAX_REASON = 2000


def work(link: QueueLink, *, name: str | None) -> None:
    """Collate until the run ends.

    Raises:
        ConfigError: The data differs from the data that the run was opened with.
        InputError: A tokenizer or the data cannot be read, or a record is bad and
            `on_bad_record` is "fail".
    """
    with worker_session(link, role=COLLATOR, name=name or "collator-0") as worker:
        worker.activity("loading tokenizers")
        loop = CollatorLoop(worker, make_collator(worker), open_data(worker))
        worker.phase("run")
        loop.serve()


def make_collator(worker: Worker) -> CrossTokenizerCollator:
    """Return the run's collator: every tokenizer of it, and an aligner per teacher with its own."""
    spec = worker.run.spec
    student = tokenizer_of(spec.student, "student")
    teachers = [
        None if same else tokenizer_of(teacher, spec.teacher_name(number))
        for number, (teacher, same) in enumerate(zip(spec.teacher, worker.run.same_tokenizer, strict=True))
    ]
    worker.alive()
    return CrossTokenizerCollator(
        student_tokenizer=student,
        teacher_tokenizer=teachers,
        aligner=[None] * len(teachers),
        ctx_length_student=spec.student.context_length,
        ctx_length_teacher=[teacher.context_length for teacher in spec.teacher],
        append_eos=spec.data.append_eos,
    )


def open_data(worker: Worker) -> DataIndex:
    """Open the training-data index; its fingerprint must match the run's.

    Raises:
        ConfigError: It has changed.
    """
    run = worker.run
    index = open_index(run.spec, run.spec.data.paths, run.spec.data.field)
    if index.fingerprint != run.data_fingerprint:
        raise ConfigError("the training data has changed since the run was opened: restore it, or start a new run")
    return index


def stores_to_skip(run: ResolvedRun) -> list[TeacherStore]:
    """Return the stores whose missing records are skipped: the collator looks for them before it makes a row."""
    teachers = enumerate(run.spec.teacher)
    return [open_store(run, number) for number, spec in teachers if spec.store and spec.store_missing == "skip"]


class CollatorLoop:
    """The collator's main loop: lease a block, read, collate, put."""

    def __init__(self, worker: Worker, collator: CrossTokenizerCollator, index: DataIndex) -> None:
        self.worker, self.queue, self.run = worker, worker.queue, worker.run
        self.collator, self.index = collator, index
        self.counts = loss_counts(self.run.spec.loss, self.run.same_tokenizer)
        self.stores = stores_to_skip(self.run)

    def serve(self) -> None:
        """Collate until the run ends."""
        while True:
            self.worker.alive()
            try:
                block = self.queue.lease_block(wait_s=WAIT_S)
                if block is not None:
                    self._collate(block)
            except QueueError as error:
                if error.code == "exhausted":
                    log.info("the run is over")
                    return
                if error.code != "lease_revoked":
                    raise
                log.info("%s", error)

    def _collate(self, block: Block) -> None:
        run = self.run
        positions = range(block.first, block.first + block.count)
        numbers = [
            record_at(p, records=run.records, seed=run.spec.seed, shuffle=run.spec.data.shuffle) for p in positions
        ]
        readable, tombstones, without_store = [], {}, {}
        for position, record in zip(positions, self.index.read(numbers), strict=True):
            if isinstance(record, BadRecord):
                tombstones[position] = f"{record.location}: {record.reason}"[:MAX_REASON]
            elif reason := self._missing(record.number):
                without_store[position] = f"{self.index.location(record.number)}: {reason}"[:MAX_REASON]
            else:
                readable.append((position, record))
        rows = self.collator.rows([record.value for _, record in readable], self.counts)
        for index, reason in rows.refused.items():
            position, record = readable[index]
            tombstones[position] = f"{self.index.location(record.number)}: {reason}"[:MAX_REASON]
        for position, reason in (tombstones | without_store).items():
            log.warning("position %d is skipped: %s", position, reason)
        if tombstones and run.spec.data.on_bad_record == "fail":
            position, reason = next(iter(tombstones.items()))
            self._fail(f"bad record at position {position}: {reason} (data.on_bad_record = fail)")
        self.queue.put_block(
            block.lease, [readable[index][0] for index in rows.records], rows.columns, tombstones | without_store
        )
        self.worker.alive(1)

    def _missing(self, record: int) -> str:
        """Return why a record is skipped for what a store does not have of it; empty if it is not skipped."""
        try:
            for store in self.stores:
                store.frame(record)
        except MissingRecordError as error:
            return str(error)
        return ""

    def _fail(self, reason: str) -> NoReturn:
        """End the run: its supervisor does so on this worker's exit status; without one, the queue notifies the others.

        Doing both would be a race: the other workers' exits could hide the status that names the cause.

        Raises:
            InputError: Always.
        """
        sessions = self.worker.client.stats()["sessions"]
        if not any(session["role"] == SUPERVISOR and not session["ended"] for session in sessions):
            self.queue.give_up(reason)
        raise InputError(reason)
