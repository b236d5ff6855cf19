"""One run of the control plane: started, or recovered after a restart, with its events in the database."""

from __future__ import annotations

import logging
from pathlib import Path

from xtoken_core.config.resolved import ResolvedRun, parse_resolved_run
from xtoken_core.config.spec import RunSpec
from xtoken_core.regular_files import JSON_LIMIT, read_below
from xtoken_services.common.files.allowed_paths import Roots
from xtoken_services.common.files.input_files import check_input_files
from xtoken_services.control.db_events import DatabaseEvents
from xtoken_services.control.isolated.inspection import inspect_run
from xtoken_services.control.recovery import infer_ending, recover
from xtoken_services.control.store import Store
from xtoken_services.control.tables import RunRow
from xtoken_services.supervisor.launchers.base import read_status
from xtoken_services.supervisor.process_group import status_path
from xtoken_services.supervisor.run_directory import QueueDirectory
from xtoken_services.supervisor.run_record import RunResult
from xtoken_services.supervisor.supervised_run import LauncherFactory, SupervisedRun

log = logging.getLogger("xtoken.control")


class Run(SupervisedRun):
    """One launch of a run in the database.

    Args:
        row: Row of the run.
        store: The database.
        roots: Directories that its workers may read and write; None for no restriction.
        launchers: Creates the launcher of its processes.
        recovered: True if an earlier control plane may have started its processes.
    """

    def __init__(
        self, row: RunRow, store: Store, roots: Roots | None, launchers: LauncherFactory, *, recovered: bool = False
    ) -> None:
        events = DatabaseEvents(store, row.id, row.launch)
        environment = roots.environment if roots is not None else {}
        spec = RunSpec.model_validate(row.spec)
        status = row.status().model_copy(update={"checking": ""})
        super().__init__(spec, status, launchers, events=events, environment=environment)
        self._row, self._store, self._recovered = row, store, recovered
        self._confined = roots is not None

    def _run(self) -> RunResult | None:
        return self._recover() if self._recovered else super()._run()

    def _resolve(self) -> tuple[ResolvedRun, list[str]]:
        """Resolve the run in a child process if its files are another user's: if there are roots."""
        if not self._confined:
            return super()._resolve()
        check_input_files(self.spec)  # a missing file is reported before a process is started
        return inspect_run(self.spec, self._note_check, self._environment)

    def _recover(self) -> RunResult | None:
        """Supervise the processes that an earlier control plane started, or infer how the run ended."""
        output, row = self.spec.output, self._row
        attempts = self._store.attempts(self.id, launch=row.launch)
        if row.queue is None:
            return infer_ending(output, attempts, {})
        queues = QueueDirectory.from_document(row.queue)
        launcher = self._launchers(self.spec, queues.private)
        source = output / "resolved.json"
        resolved = parse_resolved_run(read_below(output, source.name, JSON_LIMIT), source=str(source))
        members = self._process_specs(resolved, queues)
        recovered = recover(self.id, members, attempts, self._store.groups(self.id), launcher)
        self._events.message(recovered.summary())
        log.info("run %s: %s", self.id, recovered.summary())
        if recovered.running:
            return self._supervise(resolved, queues, launcher, recovered.groups, row.step or 0)
        result = infer_ending(output, attempts, recovered.exited)
        for attempt in attempts:
            if attempt.ended is None:
                status = read_status(status_path(Path(attempt.log)))
                self._events.exited(attempt.worker, attempt.incarnation, status)
        self._clean_up(queues, launcher)
        return result
