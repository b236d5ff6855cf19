"""One run of the control plane: started, or recovered after a restart, with its events in the database."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from xtoken_core.config.resolved import ResolvedRun, parse_resolved_run
from xtoken_core.config.spec import RunSpec
from xtoken_core.regular_files import JSON_LIMIT, read_below
from xtoken_services.common.files.allowed_paths import Roots
from xtoken_services.common.files.input_files import check_input_files
from xtoken_services.common.run.resume import RESOLVED
from xtoken_services.control.db_events import DatabaseEvents
from xtoken_services.control.isolated.inspection import inspect_run
from xtoken_services.control.recovery import infer_ending, recover
from xtoken_services.control.store import Store
from xtoken_services.control.tables import RunRow
from xtoken_services.supervisor.launchers.base import read_status
from xtoken_services.supervisor.process_group import status_path
from xtoken_services.supervisor.run import Ended, LauncherFactory, Prepare, Prepared, Run, prepare_run, process_specs
from xtoken_services.supervisor.run_directory import QueueDirectory

log = logging.getLogger("xtoken.control")


def run_of(
    row: RunRow, store: Store, roots: Roots | None, launchers: LauncherFactory, *, recovered: bool = False
) -> Run:
    """Return one launch of a run in the database.

    Args:
        row: Row of the run.
        store: The database.
        roots: Directories that its workers may read and write; None for no restriction.
        launchers: Creates the launcher of its processes.
        recovered: True if an earlier control plane may have started its processes.
    """
    environment = roots.environment if roots is not None else {}
    # Files of another user, as there are with roots, are read in a child process.
    resolve = None if roots is None else partial(_resolve_isolated, environment=environment)
    prepare: Prepare = partial(prepare_run, launchers=launchers, resolve=resolve, environment=environment)
    if recovered:
        prepare = partial(_take_over, row=row, store=store, launchers=launchers, environment=environment)
    status = row.status().model_copy(update={"checking": ""})
    return Run(RunSpec.model_validate(row.spec), status, prepare, events=DatabaseEvents(store, row.id, row.launch))


def _resolve_isolated(run: Run, *, environment: Mapping[str, str]) -> tuple[ResolvedRun, list[str]]:
    check_input_files(run.spec)  # a missing file is reported before a process is started
    return inspect_run(run.spec, run.note_check, environment)


def _take_over(
    run: Run, *, row: RunRow, store: Store, launchers: LauncherFactory, environment: Mapping[str, str]
) -> Prepared:
    """Find the processes that an earlier control plane started.

    Raises:
        Ended: None is left; the result says how the run ended.
    """
    output = run.spec.output
    attempts = store.attempts(run.id, launch=row.launch)
    if row.queue is None:
        raise Ended(infer_ending(output, attempts, {}))
    queues = QueueDirectory.from_document(row.queue)
    launcher = launchers(run.spec, queues.private)
    resolved = parse_resolved_run(read_below(output, RESOLVED, JSON_LIMIT), source=str(output / RESOLVED))
    specs = process_specs(run, resolved, queues, environment)
    earlier = recover(run.id, specs, attempts, store.groups(run.id), launcher)
    run.events.message(earlier.summary())
    log.info("run %s: %s", run.id, earlier.summary())
    prepared = Prepared(specs, queues, launcher, row.step or 0, resolved.steps, earlier.groups)
    if earlier.running:
        return prepared
    result = infer_ending(output, attempts, earlier.exited)
    for attempt in attempts:
        if attempt.ended is None:
            status = read_status(status_path(Path(attempt.log)))
            run.events.exited(attempt.worker, attempt.incarnation, status)
    prepared.clean_up(run.id)
    raise Ended(result)
