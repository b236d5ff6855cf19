"""The build of a store, and runs that begin with one."""

from __future__ import annotations

import dataclasses
import logging
from functools import partial

from xtoken_core.config.resolved import ResolvedRun, parse_resolved_run
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import XtokenError
from xtoken_core.regular_files import JSON_LIMIT, read_below
from xtoken_core.teacher_store.files import open_files
from xtoken_core.teacher_store.identity import identity_of
from xtoken_core.teacher_store.store import TeacherStore
from xtoken_core.teacher_store.writing import drop_damaged, remove_damaged_indices, remove_unfinished
from xtoken_services.common.run.resume import RESOLVED
from xtoken_services.common.run.status import RunState
from xtoken_services.common.stores.store_build import as_part_of, build_spec
from xtoken_services.common.stores.store_records import check_stores, missing_steps, records_of
from xtoken_services.supervisor.interrupts import POLL_S
from xtoken_services.supervisor.process_spec import writer_specs
from xtoken_services.supervisor.run import (
    Ended,
    Prepared,
    Run,
    already_finished,
    check_output,
    new_run,
    prepare_here,
    resolve_here,
)
from xtoken_services.supervisor.run_record import RunResult, has_ended_early, is_finished
from xtoken_services.supervisor.writer_progress import WriterProgress

log = logging.getLogger("xtoken.supervisor")

COMPLETE = "every record of the text is in the store: nothing is left to do"


def store_build(spec: RunSpec, store: str, *, run: RunSpec, verify: bool = False) -> Run:
    """Return one start of a build, which computes what its store lacks: a writer per rank, each with its share.

    Args:
        spec: From `build_spec`.
        store: Directory or address of the store.
        run: The run that the store is for: its long documents are divided to fit all of its teachers.
        verify: Read every record that the run needs, and compute those again that are damaged.
    """
    return new_run(spec, partial(_prepare_build, store=store, run=run, verify=verify))


def _prepare_build(build: Run, *, store: str, run: RunSpec, verify: bool) -> Prepared:
    found: list[ResolvedRun] = []

    def resolve(build: Run) -> tuple[ResolvedRun, list[str]]:
        resolved, warnings = resolve_build(build, store=store, run=run, verify=verify)
        found.append(resolved)
        return resolved, warnings

    prepared = prepare_here(build, resolve)
    steps = missing_steps(found[0], TeacherStore.open(store))
    writers = WriterProgress(build.spec.output, {rank: len(own) for rank, own in enumerate(steps)})
    specs = writer_specs(found[0], build.spec.output / RESOLVED, store)
    return dataclasses.replace(prepared, specs=specs, steps=writers.steps, writers=writers)


def resolve_build(build: Run, *, store: str, run: RunSpec, verify: bool = False) -> tuple[ResolvedRun, list[str]]:
    """Return a build with what its files say, and warnings; create the store if there is none.

    Args:
        build: The build.
        store: As of `store_build`, as are `run` and `verify`.
        run: See there.
        verify: See there.

    Raises:
        Ended: The store is complete.
    """
    from xtoken_services.common.run.resolve import reading

    resolved, warnings = resolve_here(build)
    resolved = as_part_of(resolved, run, reading(build.note_check))
    # The lock on the build's directory keeps out any other build of this store.
    for name in remove_damaged_indices(open_files(store)) if verify else ():
        log.warning("the index %s of the store %s is damaged: its records are computed again", name, store)
    opened = TeacherStore.create(store, identity_of(resolved, 0))
    for name in remove_unfinished(opened.files):
        log.warning("removed %s, which a killed build has left behind", name)
    for record in drop_damaged(opened, records_of(resolved)) if verify else ():
        log.warning("record %d of the text is damaged in the store %s: it is computed again", record, store)
    if not any(missing_steps(resolved, opened)):
        build.events.message(COMPLETE)
        build.note(step=resolved.steps, steps=resolved.steps)
        raise Ended(RunResult(RunState.COMPLETED))
    return resolved, warnings


def prepare_after_builds(run: Run, *, loss: str | None = None) -> Prepared:
    """Complete the stores of teachers that compute what these lack (`store_missing = "compute"`), then prepare the run.

    Args:
        run: The run; nothing is done for a complete one.
        loss: As of `prepare_here`, as are the errors.
    """
    complete = _complete(run.spec)
    if complete is not None:
        raise already_finished(run, complete.steps)
    for number, teacher in enumerate(run.spec.teacher):
        if teacher.store is not None and teacher.store_missing == "compute":
            _complete_store(run, number, teacher.store)
    return prepare_here(run, _resolve_with_stores, loss=loss)


def _resolve_with_stores(run: Run) -> tuple[ResolvedRun, list[str]]:
    """Return the run as its files say, its stores complete now."""
    resolved, warnings = resolve_here(run)
    check_stores(resolved, completed=True)
    return resolved, warnings


def _complete(spec: RunSpec) -> ResolvedRun | None:
    """Return a run as its last start has resolved it, if that has trained every step and written the model."""
    output = spec.output
    if not is_finished(spec):
        return None
    try:
        source = output / RESOLVED
        resolved = parse_resolved_run(read_below(output, RESOLVED, JSON_LIMIT), source=str(source))
    except (OSError, XtokenError):
        return None
    step = check_output(resolved)
    return resolved if step >= resolved.steps or has_ended_early(output, step) else None


def _complete_store(run: Run, number: int, store: str) -> None:
    """Build what a store lacks, or has damaged, for a run.

    Raises:
        Ended: The build was stopped with the run, or has failed.
    """
    run.check_stop()
    build = store_build(build_spec(run.spec, number, store), store, run=run.spec, verify=True)
    build.start()
    while not build.over.wait(POLL_S):
        if run.stop_requested:
            build.stop(now=run.stops_now)
        status = build.status()
        run.note(checking=f"completing the store {store}: step {status.step or 0} of {status.steps}")
    run.note(checking="")
    if build.refusal is not None:
        raise build.refusal
    ended = build.result
    assert ended is not None, "a build is never left"
    if ended.state == RunState.STOPPED:
        raise Ended(RunResult(RunState.STOPPED, "", 130))
    if ended.state != RunState.COMPLETED:
        raise Ended(dataclasses.replace(ended, error=f"completing the store {store}: {ended.error}"))
