"""One run of the control plane: started, or recovered after a restart, with its events in the database."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from xtoken_core.config.resolved import ResolvedRun, parse_resolved_run
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError
from xtoken_core.regular_files import JSON_LIMIT, read_below
from xtoken_services.common.files.input_files import check_input_files
from xtoken_services.common.run.inspection import inspect_run
from xtoken_services.common.run.resume import RESOLVED
from xtoken_services.common.run.status import RunState
from xtoken_services.control.store import Store, StoreError, now
from xtoken_services.control.tables import AttemptRow, GroupRow, RunRow
from xtoken_services.supervisor.events import Attempt, SupervisorEvents
from xtoken_services.supervisor.launchers.base import Handle, Launcher, read_status
from xtoken_services.supervisor.os_process import mark_of
from xtoken_services.supervisor.process_group import RecoveredGroup, describe_exit, last_log_line, status_path
from xtoken_services.supervisor.process_spec import ProcessSpec
from xtoken_services.supervisor.run import Ended, LauncherFactory, Prepare, Prepared, Run, prepare_run, process_specs
from xtoken_services.supervisor.run_directory import QueueDirectory
from xtoken_services.supervisor.run_record import SUMMARY, RunResult

log = logging.getLogger("xtoken.control")
RESUME = "resume the run to continue from its last checkpoint"


def run_of(
    row: RunRow, store: Store, environment: Mapping[str, str], launchers: LauncherFactory, *, recovered: bool = False
) -> Run:
    """Return one launch of a run in the database.

    Args:
        row: Row of the run.
        store: The database.
        environment: Variables with the directories that its workers may read and write; empty for no restriction.
        launchers: Creates the launcher of its processes.
        recovered: True if an earlier control plane may have started its processes.
    """
    # Files of another user, as there are with roots, are read in a child process.
    resolve = partial(_resolve_isolated, environment=environment) if environment else None
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


class DatabaseEvents(SupervisorEvents):
    """Writer of one run's events; database write failures are logged and ignored, so that training continues.

    Args:
        store: The database.
        run_id: Id of the run.
        launch: Number of the run's current launch.
    """

    def __init__(self, store: Store, run_id: str, launch: int) -> None:
        self._store, self._run_id, self._launch = store, run_id, launch
        self._written: dict[str, Any] = {}

    def state_changed(self, state: RunState) -> None:
        """Update the run's state."""
        self._change(state=state)

    def progressed(self, step: int, steps: int) -> None:
        """Update the run's steps."""
        self._change(step=step, steps=steps)

    def queues_assigned(self, queues: dict[str, Any]) -> None:
        """Store the addresses of the run's queues."""
        self._change(queue=queues)

    def starting(self, attempts: Sequence[Attempt]) -> None:
        """Insert a row for each attempt, without an identity yet."""
        of = {"run_id": self._run_id, "launch": self._launch, "started": now()}
        rows = [AttemptRow(**of, **asdict(attempt) | {"log": str(attempt.log)}) for attempt in attempts]
        self._write(lambda: self._store.add_attempts(rows))

    def started(self, worker: str, incarnation: int, identity: dict[str, Any]) -> None:
        """Store the identity of the attempt's process."""
        self._write(lambda: self._store.change_attempt(self._run_id, worker, incarnation, identity=identity))

    def exited(self, worker: str, incarnation: int, exit_code: int | None) -> None:
        """Store the time and status of the attempt's exit."""
        end = {"ended": now(), "exit_code": exit_code}
        self._write(lambda: self._store.change_attempt(self._run_id, worker, incarnation, **end))

    def failures_counted(self, group: str, restarts: int, failures: int, highest_step: int) -> None:
        """Replace the group's row."""
        row = GroupRow(run_id=self._run_id, name=group, restarts=restarts, failures=failures, highest_step=highest_step)
        self._write(lambda: self._store.set_group(row))

    def message(self, text: str, *, worker: str = "") -> None:
        """Insert a note."""
        self._write(lambda: self._store.add_note(self._run_id, text, worker=worker))

    def ended(self, state: RunState, error: str, exit_code: int) -> None:
        """Store how the run ended, as columns and as a note."""
        self._change(state=state, error=error, exit_code=exit_code, ended=now())
        self.message(f"{state}: {error}" if error else state)

    def _change(self, **columns: Any) -> None:
        """Update the columns that differ from what was written last."""
        new = {k: v for k, v in columns.items() if k not in self._written or self._written[k] != v}
        if new and self._write(lambda: self._store.change(self._run_id, **new)):
            self._written |= new

    def _write(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except StoreError as error:
            log.error("run %s: %s", self._run_id, error)
            return False
        return True


@dataclass(frozen=True)
class RecoveredRun:
    """State of a run's processes as found after a restart.

    Attributes:
        groups: State of each process group, by name.
        running: Workers whose processes are still running.
        exited: Workers whose processes exited while no control plane was running, with the reason.
    """

    groups: dict[str, RecoveredGroup] = field(default_factory=dict)
    running: tuple[str, ...] = ()
    exited: dict[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        """Summarise in one line, for the run's history."""
        running = f"recovered: {', '.join(self.running)}" if self.running else "no process is running"
        exited = "; ".join(f"{worker} {reason}" for worker, reason in self.exited.items())
        return f"{running}; meanwhile {exited}" if exited else running


def recover(
    run_id: str,
    members: Sequence[ProcessSpec],
    attempts: Sequence[AttemptRow],
    counts: dict[str, GroupRow],
    launcher: Launcher,
) -> RecoveredRun:
    """Find the processes of a run's last launch.

    A group of which a process failed, or was never started, is killed and restarted as a whole.

    Args:
        run_id: Id of the run.
        members: Process specs of the run.
        attempts: Attempts of its last launch, oldest first.
        counts: Failure counts of its groups.
        launcher: Launcher that started the processes.
    """
    last = {attempt.worker: attempt for attempt in attempts}
    nodes = {member.name: member.node for member in members}
    groups: dict[str, RecoveredGroup] = {}
    running: list[str] = []
    exited: dict[str, str] = {}
    for name in dict.fromkeys(member.group for member in members):
        starts = [last[m.name] for m in members if m.group == name and m.name in last]
        if not starts:
            continue
        handles = {
            start.worker: launcher.attach(
                start.identity,
                mark_of(run_id, start.worker, start.incarnation),
                status_path(Path(start.log)),
                node=nodes[start.worker],
            )
            for start in starts
            if start.ended is None
        }
        running += [worker for worker, handle in handles.items() if handle.poll() is None]
        exited |= {
            worker: describe_exit(handle.poll()) for worker, handle in handles.items() if handle.poll() is not None
        }
        size = sum(member.group == name for member in members)
        groups[name] = _group(starts, handles, counts.get(name), complete=len(starts) == size)
    return RecoveredRun(groups, tuple(running), exited)


def _group(
    starts: Sequence[AttemptRow], handles: dict[str, Handle], count: GroupRow | None, *, complete: bool
) -> RecoveredGroup:
    failed = not complete or any(start.ended is not None and start.exit_code != 0 for start in starts)
    if failed:
        for handle in handles.values():
            handle.kill()
    return RecoveredGroup(
        incarnation=max(start.incarnation for start in starts),
        handles={} if failed else handles,
        waiting=failed,
        restarts=count.restarts if count else 0,
        failures=count.failures if count else 0,
        highest_step=count.highest_step if count else 0,
    )


def infer_ending(output: Path, attempts: Sequence[AttemptRow], exited: dict[str, str]) -> RunResult:
    """Infer how a run ended while no control plane was running, from its files and exit statuses.

    Args:
        output: Output directory of the run.
        attempts: Attempts of its last launch, oldest first.
        exited: Reasons why its workers exited, by worker.
    """
    last = {attempt.worker: attempt for attempt in attempts}
    statuses = {
        worker: start.exit_code if start.ended is not None else read_status(status_path(Path(start.log)))
        for worker, start in last.items()
    }
    trainers = [statuses[worker] for worker, start in last.items() if start.kind == "trainer"]
    if trainers and not any(trainers) and (output / SUMMARY).exists():
        return RunResult(RunState.COMPLETED)
    for worker, status in statuses.items():
        if status == ConfigError.exit_code:
            message = last_log_line(Path(last[worker].log)).removeprefix("error: ")
            return RunResult(RunState.FAILED, f"{worker}: {message}", ConfigError.exit_code)
    if not last:
        error = f"the control plane exited before it had started any process: {RESUME}"
        return RunResult(RunState.INTERRUPTED, error, 1)
    reasons = "; ".join(f"{worker} {reason}" for worker, reason in exited.items())
    error = f"all processes exited while no control plane was running{f' ({reasons})' if reasons else ''}: {RESUME}"
    return RunResult(RunState.INTERRUPTED, error, 1)
