"""Parts of collators and rollout workers alike: leases of blocks, collator, text, counts of rows, the end of a run."""

from __future__ import annotations

import logging
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from xtoken_core import schema
from xtoken_core.collate import PLACE, Counts, CrossTokenizerCollator
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.routing import RouteError
from xtoken_core.config.spec import RunSpec
from xtoken_core.dataset import BadRecord, JoinedIndex, Record, TextIndex
from xtoken_core.dataset.records import PREFIX, ROUTE, Route
from xtoken_core.errors import ConfigError, InputError
from xtoken_core.losses.masks import loss_counts
from xtoken_core.queue.run.names import SUPERVISOR
from xtoken_core.wire import Column
from xtoken_core.wire.messages import Block
from xtoken_services.common.processes.worker import WAIT_S, Worker
from xtoken_services.common.text.run_order import record_of
from xtoken_services.common.text.training_text import open_text
from xtoken_services.common.tokenizers.loading import aligners_of, tokenizer_of

log = logging.getLogger("xtoken.worker")

C = TypeVar("C", bound=CrossTokenizerCollator)

MAX_REASON = 2000
"""Longest reason of a tombstone, in characters."""
HOW_TO_SKIP = 'data.on_bad_record = "fail"; with "skip" such records are left out'
LOOKED_AT = 64
LOOKED_AT_CHARACTERS = 2 << 20
"""Positions that are collated before the first step, to see what will be skipped or cut; and their text at most."""


def serve_blocks(worker: Worker, fill: Callable[[Block], None]) -> None:
    """Lease blocks of positions until the run ends.

    Args:
        worker: The collator or rollout worker.
        fill: Puts a row or a tombstone for each position of a block; a lease that is revoked meanwhile is left.

    Raises:
        QueueError: The queue refuses for another reason.
    """
    worker.serve(lambda: fill(worker.until(lambda: worker.queue.lease_block(wait_s=WAIT_S))), unless="lease_revoked")


def make_collator(run: ResolvedRun) -> CrossTokenizerCollator:
    """Return the run's collator of text."""
    return collator_of(CrossTokenizerCollator, run)


def collator_of(kind: type[C], run: ResolvedRun) -> C:
    """Return a collator of the run: every tokenizer of it, and an aligner per teacher with its own.

    Args:
        kind: Its class.
        run: The run.
    """
    spec = run.spec
    student = tokenizer_of(spec.student, "student")
    teachers = [
        None if same else tokenizer_of(teacher, spec.teacher_name(number))
        for number, (teacher, same) in enumerate(zip(spec.teacher, run.same_tokenizer, strict=True))
    ]
    return collator_with(kind, spec, student, teachers, [files.prompt for files in run.teachers])


def collator_with(kind: type[C], spec: RunSpec, student: Any, teachers: Sequence[Any], prompts: Sequence[str]) -> C:
    """Return a collator of tokenizers that are loaded.

    Args:
        kind: Its class.
        spec: The run's settings.
        student: The student's tokenizer.
        teachers: Each teacher's; None for one that reads the student's rows.
        prompts: What each teacher reads before every text.
    """
    return kind(
        student_tokenizer=student,
        teacher_tokenizer=teachers,
        aligner=aligners_of(spec, student, teachers),
        ctx_length_student=spec.student.context_length,
        ctx_length_teacher=[teacher.context_length for teacher in spec.teacher],
        teacher_prompt=prompts,
        append_eos=spec.data.append_eos,
        train_on=spec.data.train_on,
    )


def open_data(run: ResolvedRun) -> TextIndex:
    """Open the training-data index; its fingerprint must match the run's.

    Raises:
        ConfigError: It has changed.
    """
    index = open_text(run.spec, run.piece_bytes)
    if index.fingerprint != run.data_fingerprint:
        raise ConfigError("the training data has changed since the run was opened: restore it, or start a new run")
    return index


def marks_of_text(count: int) -> dict[str, Tensor]:
    """Return the columns of `schema.ROLLOUT_FIELDS` for rows of ordinary text."""
    return {field.name: torch.full((count,), field.pad) for field in schema.ROLLOUT_FIELDS}


class BadRecordError(InputError):
    """A record cannot be used, and the run ends for that."""


def collate_positions(
    run: ResolvedRun,
    collator: CrossTokenizerCollator,
    index: TextIndex,
    counts: Counts,
    positions: Sequence[int],
    absent: Mapping[int, str] = MappingProxyType({}),
) -> tuple[list[int], dict[str, Column], dict[int, str]]:
    """Read and collate the records of some positions.

    Args:
        run: The run.
        collator: Its collator.
        index: Its text.
        counts: From `row_counts`.
        positions: Which.
        absent: By number of the record, why it is skipped whatever it is.

    Returns:
        The positions that have a row, the columns of these, and of the others the reason why they have none.

    Raises:
        BadRecordError: One cannot be used, and `on_bad_record` is "fail".
    """
    readable, tombstones, skipped = [], {}, {}
    numbers = [record_of(run, position) for position in positions]
    for position, record in zip(positions, index.read(numbers), strict=True):
        if isinstance(record, BadRecord):
            tombstones[position] = f"{record.location}: {record.reason}"[:MAX_REASON]
        elif reason := absent.get(record.number):
            skipped[position] = f"{index.location(record.number)}: {reason}"[:MAX_REASON]
        else:
            try:
                value = value_with_route(run, index, record)
            except RouteError as error:
                tombstones[position] = f"{index.location(record.number)}: {error}"[:MAX_REASON]
                continue
            if ROUTE in value and not value[ROUTE].teachers:  # in a store's build, which has one of a run's teachers
                skipped[position] = "other teachers compare it"
            else:
                readable.append((position, Record(record.number, value)))
    rows = collator.rows([record.value for _, record in readable], counts)
    for at, reason in rows.refused.items():
        position, record = readable[at]
        tombstones[position] = f"{index.location(record.number)}: {reason}"[:MAX_REASON]
    for position, reason in (tombstones | skipped).items():
        log.warning("position %d is skipped: %s", position, reason)
    if tombstones and run.spec.data.on_bad_record == "fail":
        position, reason = next(iter(tombstones.items()))
        raise BadRecordError(f"bad record at position {position}: {reason} ({HOW_TO_SKIP})")
    return [readable[at][0] for at in rows.records], rows.columns, tombstones | skipped


def value_with_route(run: ResolvedRun, index: TextIndex, record: Record) -> dict[str, Any]:
    """Return a record's value with the teachers that compare it, in a run with routes.

    Raises:
        RouteError: It names a teacher that the run does not have, or has a prefix for one that cannot read it.
    """
    value, teachers = record.value, tuple(range(len(run.teachers)))
    if run.routes is not None:
        source = index.source_of(record.number) if isinstance(index, JoinedIndex) else 0
        teachers = run.routes.teachers_of(value, source)
        value = value | {ROUTE: Route(teachers)}
    if PREFIX in value and any(run.same_tokenizer[number] for number in teachers):
        number = next(number for number in teachers if run.same_tokenizer[number])
        raise RouteError(
            f"it has a {PREFIX}, and {run.spec.teacher_name(number)} reads the student's rows, as it has its "
            f'tokenizer: give it rows of its own by teacher.prompt = "{PLACE}"'
        )
    return value


def look_at_sample(
    run: ResolvedRun, collator: CrossTokenizerCollator, index: TextIndex, counts: Counts
) -> dict[str, Any]:
    """Collate positions that lie evenly in a run, and count what is skipped or cut; arguments as `collate_positions`.

    A tokenizer may take seconds for each mebibyte: of long texts fewer are looked at.

    Returns:
        The numbers of `positions`, `skipped` and `truncated` ones and of `tokens`, and why the first is skipped.

    Raises:
        BadRecordError: None can be used, one cannot and `on_bad_record` is "fail", or one names an unknown teacher.
    """
    per_step, prompts = run.spec.train.samples_per_step, run.prompts

    def texts_before(step: int) -> int:
        return step * per_step - prompts.before(step)

    last = run.steps - 1  # texts are the first samples of a step, and the last step may be a part of one
    total = texts_before(last) + min(per_step - prompts.at(last), run.positions - last * per_step)
    number = min(LOOKED_AT, total)
    chosen = [at * total // number for at in range(number)]
    positions, room = [], LOOKED_AT_CHARACTERS
    for text in random.Random(0).sample(chosen, number):  # where there is no room for all, from the whole run
        step = bisect_right(range(1, run.steps), text, key=texts_before)
        position = step * per_step + text - texts_before(step)
        (record,) = index.read([record_of(run, position)])
        try:
            value_with_route(run, index, record) if isinstance(record, Record) else None
        except RouteError as error:
            raise BadRecordError(f"{index.location(record.number)}: {error}") from error
        size = 0 if isinstance(record, BadRecord) else len(record.document)
        if size <= room:
            positions.append(position)
            room -= size
    number = len(positions)
    ids, columns, reasons = collate_positions(run, collator, index, counts, sorted(positions))
    reason = next(iter(reasons.values()), "")
    if number and not ids:
        part = " (text, which rollout.fraction and rollout.after leave beside prompts)" * bool(run.spec.rollout)
        raise BadRecordError(
            f"none of {number} samples, evenly spread over the run, can be used; the first: {reason}{part}"
        )
    cut = sum(columns[schema.TRUNCATED.name].values.cast("?")) if ids else 0
    tokens = sum(columns[schema.INPUT_LENGTHS.name].values.cast("q")) if ids else 0
    return {"positions": number, "skipped": number - len(ids), "truncated": cut, "tokens": tokens, "reason": reason}


def row_counts(run: ResolvedRun) -> Counts:
    """Return a function that counts each row's part of a step's denominators, and marks text in a run with rollouts."""
    counts = loss_counts(run.spec.loss, run.same_tokenizer)
    if run.spec.rollout is None:
        return counts

    def marked(batch: Mapping[str, Any]) -> Mapping[str, Tensor]:
        ids = batch[schema.INPUT_IDS.name]
        marks = marks_of_text(len(ids))
        if run.spec.loss.importance_cap is not None:
            marks[schema.SAMPLED_LOG_PROBS.name] = torch.zeros(ids.shape)
        return {**counts(batch), **marks}

    return marked


def end_run(worker: Worker, reason: str) -> NoReturn:
    """End the run: its supervisor does so on this worker's exit status; without one, the queue notifies the others.

    Doing both would be a race: the other workers' exits could hide the status that names the cause.

    Raises:
        InputError: Always.
    """
    sessions = worker.client.stats()["sessions"]
    if not any(session["role"] == SUPERVISOR and not session["ended"] for session in sessions):
        worker.queue.give_up(reason)
    raise InputError(reason)
