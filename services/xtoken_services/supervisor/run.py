"""One start of a run: what is prepared for its processes, their supervision, and what is cleaned up after them."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import XtokenError
from xtoken_core.regular_files import access_of_others
from xtoken_core.transports import remove_stale_files
from xtoken_services.common.files.input_files import check_input_files
from xtoken_services.common.files.private_files import OTHERS_WRITE
from xtoken_services.common.run.resume import (
    CHECKPOINTS,
    RESOLVED,
    check_identity,
    newest_checkpoint,
    read_run_document,
    unreadable,
)
from xtoken_services.common.run.run_warnings import is_size
from xtoken_services.common.run.status import RunState, RunStatus
from xtoken_services.supervisor.events import SupervisorEvents
from xtoken_services.supervisor.launchers.base import Launcher
from xtoken_services.supervisor.launchers.forks import ForkServer, fork_server_of_run
from xtoken_services.supervisor.launchers.local import LocalLauncher
from xtoken_services.supervisor.process_group import RecoveredGroup
from xtoken_services.supervisor.process_spec import ProcessSpec, build_process_specs
from xtoken_services.supervisor.run_directory import QueueDirectory, sole_writer
from xtoken_services.supervisor.run_record import (
    FILE,
    SPEC,
    SUMMARY,
    RunRecord,
    RunResult,
    has_ended_early,
    is_finished,
    read_record,
    step_of_early_end,
    write_json,
    write_record,
)
from xtoken_services.supervisor.supervisor import SUPERVISOR_FAILED, Limits, Supervisor
from xtoken_services.supervisor.writer_progress import WriterProgress

log = logging.getLogger("xtoken.supervisor")

JOIN_POLL_S = 0.1
NOTHING_LEFT = "every step is trained and the model is written: nothing is left to do"

LauncherFactory = Callable[[RunSpec, Path], Launcher]
"""Creates the launcher of a run, given its specification and its private directory."""


class Ended(Exception):  # noqa: N818 - how a run ended, not necessarily a failure
    """The run has ended before any of its processes was started.

    Attributes:
        result: How it ended.
    """

    def __init__(self, result: RunResult) -> None:
        super().__init__(result)
        self.result = result


@dataclass(frozen=True)
class Prepared:
    """State of a run before its supervisor.

    Attributes:
        specs: Its processes.
        queues: The private directory of its queues.
        launcher: Starts its processes.
        step: Step that it resumes from.
        steps: Optimiser steps of the whole run.
        recovered: State in which an earlier supervisor has left its process groups.
        writers: As of `NodeGroups`.
    """

    specs: tuple[ProcessSpec, ...]
    queues: QueueDirectory
    launcher: Launcher
    step: int
    steps: int
    recovered: Mapping[str, RecoveredGroup] = field(default_factory=dict)
    writers: WriterProgress | None = None

    def clean_up(self, run_id: str) -> None:
        """End what still carries the run's mark, and remove its sockets and shared memory."""
        self.launcher.kill_marked(f"{run_id}/")
        self.launcher.close()
        self.queues.remove()
        remove_stale_files()


Prepare = Callable[["Run"], Prepared]
"""Makes what the processes of a run need, in the run's thread, while its output is locked.

It raises `Ended` if there is nothing to start, and an XtokenError if the run is refused."""


class Run:
    """One start of a run, in a thread of its own.

    The supervisor never runs in the caller's main thread: there, a terminal that blocks would keep it from its workers.
    Kinds of runs differ in what prepares them: a training, the build of a store, the processes of an earlier control
    plane.

    Attributes:
        started: Set once its processes are about to start, or never will.
        over: Set once nothing more is done about it here: it has ended, or was left to continue without a supervisor.
        result: How it ended; None while it runs, and if it was left.
        refusal: The error that `prepare` raised, if that ended it.

    Args:
        spec: What to run; its paths are absolute.
        status: The run before this start; its id is in the marks of its processes.
        prepare: Makes what its processes need.
        events: Observer of its supervisor.
    """

    def __init__(
        self, spec: RunSpec, status: RunStatus, prepare: Prepare, *, events: SupervisorEvents | None = None
    ) -> None:
        self.id, self.spec = status.id, spec
        self.events = events or SupervisorEvents()
        self.started, self.over = threading.Event(), threading.Event()
        self.result: RunResult | None = None
        self.refusal: XtokenError | None = None
        self.stop_requested = self.stops_now = False
        self._detach_requested = False
        self._prepare = prepare
        self._status = status
        self._supervisor: Supervisor | None = None
        self._end: dict[str, Any] = {}
        self._over_at = 0.0
        self._at_end = ExitStack()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"run {self.id}", daemon=True)

    def start(self) -> None:
        """Start, in a thread of its own."""
        self._thread.start()

    def stop(self, *, now: bool = False) -> None:
        """Request a graceful shutdown, or with `now` an immediate one; do not wait."""
        with self._lock:
            if self.result is not None:
                return
            self.stop_requested, self.stops_now = True, self.stops_now or now
            self.events.state_changed(RunState.STOPPING)
            if self._supervisor is not None:
                self._supervisor.stop(now=now)

    def detach(self) -> None:
        """Let the run's processes continue without a supervisor."""
        with self._lock:
            self._detach_requested = True
            if self._supervisor is not None:
                self._supervisor.detach()

    def join(self) -> None:
        """Wait until nothing more is done about it here; after a stop, do not wait for the check of its files."""
        while not self.over.wait(JOIN_POLL_S):
            with self._lock:
                if (self.stop_requested or self._detach_requested) and self._supervisor is None:
                    return

    @property
    def tick_age_s(self) -> float:
        """Seconds since its supervisor last completed a round; 0 while it has none."""
        return time.monotonic() - self._supervisor.ticked_at if self._supervisor else 0.0

    @property
    def over_for_s(self) -> float:
        """Seconds since it was over; 0 while it is not."""
        return time.monotonic() - self._over_at if self.over.is_set() else 0.0

    def status(self) -> RunStatus:
        """Return the supervisor's last status, without a request to another process."""
        status = self._status if self._supervisor is None else self._supervisor.status()
        if self.result is not None:
            return status.model_copy(update=self._end)
        if self.stop_requested:
            return status.model_copy(update={"state": RunState.STOPPING})
        if status.state.over:
            # The supervisor has ended the run, and this thread still removes its sockets and shared memory.
            return status.model_copy(update={"state": RunState.RUNNING, "error": ""})
        return status

    # For what prepares it, in its own thread

    def note(self, **known: Any) -> None:
        """Replace fields of the status, which are shown until there is a supervisor."""
        self._status = self._status.model_copy(update=known)

    def note_check(self, activity: str, done: float) -> None:
        """Show what is read or built for long, and the fraction of it that is done.

        Raises:
            Ended: A stop was requested: reading a large text for the first time takes minutes.
        """
        from xtoken_services.common.run.resolve import READING  # not at the top: it imports the data readers

        if activity == READING:
            self.note(text_read=done, checking="")
        else:
            self.note(text_read=None, checking=f"{activity}: {done:.0%}")
        self.check_stop()

    def check_stop(self) -> None:
        """End the run if a stop was requested.

        Raises:
            Ended: It was.
        """
        if self.stop_requested:
            raise Ended(RunResult(RunState.STOPPED, "", 130))

    def at_end(self, close: Callable[[], None]) -> None:
        """Have a function called once no process of the run is left, or it was left to continue."""
        self._at_end.callback(close)

    # In its own thread

    def _work(self) -> None:
        result: RunResult | None = RunResult(RunState.FAILED, SUPERVISOR_FAILED, 1)
        try:
            with self._at_end, sole_writer(self.spec.output, self.id):
                result = self._supervise(self._prepare(self))
        except Ended as end:
            result = end.result
        except XtokenError as error:
            self.refusal = error
            result = RunResult(RunState.FAILED, str(error), error.exit_code)
        except OSError as error:
            result = RunResult(RunState.FAILED, f"cannot start the run: {error}", 1)
        except Exception:
            log.exception("run %s: %s", self.id, SUPERVISOR_FAILED)
        finally:
            self._finish(result)

    def _supervise(self, prepared: Prepared) -> RunResult | None:
        workers = self.spec.workers
        limits = Limits(
            max_restarts=workers.max_restarts, hang_timeout_s=workers.hang_timeout_s, grace_s=workers.stop_timeout_s
        )
        result: RunResult | None = RunResult(RunState.FAILED, SUPERVISOR_FAILED, 1)
        try:
            supervisor = Supervisor(
                self._status.model_copy(update={"step": prepared.step, "steps": prepared.steps}),
                prepared.specs,
                prepared.queues.addresses,
                prepared.launcher,
                limits,
                events=self.events,
                recovered=prepared.recovered,
                writers=prepared.writers,
            )
            with self._lock:  # a request that came before there was a supervisor
                self._supervisor = supervisor
                if self.stop_requested:
                    supervisor.stop(now=self.stops_now)
                if self._detach_requested:
                    supervisor.detach()
            self.started.set()
            result = supervisor.run()
            return result
        finally:
            if result is not None:
                prepared.clean_up(self.id)
            else:
                prepared.launcher.close()

    def _finish(self, result: RunResult | None) -> None:
        if result is not None:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._end = {**dataclasses.asdict(result), "ended": now}
            early = step_of_early_end(self.spec.output) if result.state == RunState.COMPLETED else None
            if early is not None:  # a queue counts the steps that were left out as done
                self._end["step"] = early
                self.events.progressed(early, self.status().steps or early)
        with self._lock:
            self.result = result
            if result is not None:
                self.events.ended(result.state, result.error, result.exit_code)
        outcome = f"{result.state} {result.error}".strip() if result else "left to continue without a supervisor"
        log.info("run %s: %s", self.id, outcome)
        self._over_at = time.monotonic()
        self.started.set()
        self.over.set()


def new_run(spec: RunSpec, prepare: Prepare, events: SupervisorEvents | None = None) -> Run:
    """Return a run that has an id of its own."""
    return Run(spec, RunStatus.starting(spec, f"{spec.name}-{secrets.token_hex(4)}"), prepare, events=events)


def launcher_factory(*, tied: bool, forks: ForkServer | None = None) -> LauncherFactory:
    """Return a factory of the launchers that runs' settings name; see `LocalLauncher` for the arguments."""

    def create(spec: RunSpec, private: Path) -> Launcher:
        if spec.workers.launcher == "ray":
            from xtoken_services.supervisor.launchers.ray import RayLauncher

            return RayLauncher(spec, private, tied=tied)
        return LocalLauncher(tied=tied, private=[private], forks=forks)

    return create


Resolve = Callable[[Run], tuple[ResolvedRun, list[str]]]
"""Returns a run with what its files say, and warnings about its settings."""


def resolve_here(run: Run) -> tuple[ResolvedRun, list[str]]:
    """Resolve a run in this process; see `check_start`."""
    check_input_files(run.spec)
    # Missing files are reported above, before these imports: they take longer than starting Python.
    from xtoken_services.common.run.start_checks import check_start

    return check_start(run.spec, run.note_check)


def prepare_run(
    run: Run,
    launchers: LauncherFactory,
    resolve: Resolve | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    loss: str | None = None,
) -> Prepared:
    """Prepare a run from its specification.

    Args:
        run: The run.
        launchers: Creates its launcher.
        resolve: Reads its files; None: `resolve_here`.
        environment: Variables to add to the environment of every process.
        loss: `module:Class` of a custom loss, for the trainers' command lines.

    Raises:
        Ended: An earlier start has trained every step and written the model.
        XtokenError: The run is refused.
    """
    output = run.spec.output
    try:
        resolved, warnings = (resolve or resolve_here)(run)
    except XtokenError as error:
        if not (output / FILE).exists():  # the record of an earlier start says more than a refusal
            write_record(output, RunRecord.of(RunResult(RunState.FAILED, str(error), error.exit_code)))
        raise
    step = check_output(resolved)  # before anything is written: another run's files stay as they are
    ended_early = has_ended_early(output, step)
    if (step >= resolved.steps or ended_early) and is_finished(run.spec):
        raise already_finished(run, resolved.steps)
    if ended_early:
        (output / SUMMARY).unlink()  # the run resumes, with other settings: it has no summary yet
    write_json(output / SPEC, run.spec.model_dump(mode="json"))
    write_json(output / RESOLVED, resolved.model_dump(mode="json"))
    if access := access_of_others(output.stat(), OTHERS_WRITE):
        warnings.append(
            f"the output directory {output} {access}: others may change what the run reads again: chmod 700 it"
        )
    sizes = "\n".join(filter(is_size, warnings))
    for text in filter(None, (sizes, *(line for line in warnings if not is_size(line)))):
        run.events.message(text)
    for line in warnings:
        log.log(logging.INFO if is_size(line) else logging.WARNING, "%s", line)
    queues = QueueDirectory.create(run.spec)
    run.events.queues_assigned(queues.to_document())
    run.events.progressed(step, resolved.steps)
    specs = process_specs(run, resolved, queues, environment, loss)
    return Prepared(specs, queues, launchers(run.spec, queues.private), step, resolved.steps)


def prepare_here(run: Run, resolve: Resolve | None = None, *, loss: str | None = None) -> Prepared:
    """Prepare a run whose processes end with this one: they are forked from a server that imports meanwhile.

    A control plane's are not: they may outlive it.

    Args:
        run: As of `prepare_run`, as are `resolve`, `loss` and the errors.
        resolve: See there.
        loss: See there.
    """
    forks = fork_server_of_run(run.spec)
    if forks is not None:
        run.at_end(forks.close)
    return prepare_run(run, launcher_factory(tied=True, forks=forks), resolve, loss=loss)


def already_finished(run: Run, steps: int) -> Ended:
    """Return the end of a run of which an earlier start has trained every step and written the model."""
    run.events.progressed(steps, steps)
    run.events.message(NOTHING_LEFT)
    log.warning("%s: %s", run.spec.output, NOTHING_LEFT)
    run.note(step=steps, steps=steps)
    result = RunResult(RunState.COMPLETED)
    end = RunRecord.of(result).model_dump(exclude_unset=True)
    write_record(run.spec.output, read_record(run.spec.output).model_copy(update=end))
    return Ended(result)


def process_specs(
    run: Run,
    resolved: ResolvedRun,
    queues: QueueDirectory,
    environment: Mapping[str, str] | None = None,
    loss: str | None = None,
) -> tuple[ProcessSpec, ...]:
    """Return the processes of a run, with these variables in the environment of each."""
    specs = build_process_specs(resolved, run.spec.output / RESOLVED, queues.addresses, loss)
    return tuple(dataclasses.replace(spec, env={**spec.env, **(environment or {})}) for spec in specs)


def check_output(run: ResolvedRun) -> int:
    """Refuse an output directory whose newest checkpoint is another run's.

    Returns:
        The step at which the run resumes: the newest checkpoint's, 0 without one.

    Raises:
        ConfigError: It is another run's.
        InputError: The checkpoint cannot be read.
    """
    path = newest_checkpoint(run.spec.output / CHECKPOINTS)
    if path is None:
        return 0
    identity, cursor = read_run_document(path)
    check_identity(path, identity, run)
    step = cursor.get("step")
    if not isinstance(step, int) or step < 0:
        raise unreadable(path, ValueError("its cursor has no step"))
    return step
