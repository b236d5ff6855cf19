"""One start of a run: check its files, supervise its processes, clean up."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import XtokenError
from xtoken_core.transports import remove_stale_files
from xtoken_services.common.files.input_files import check_input_files
from xtoken_services.common.run.resume import check_output
from xtoken_services.common.run.status import RunState, RunStatus
from xtoken_services.supervisor.events import SupervisorEvents
from xtoken_services.supervisor.launchers.base import Launcher
from xtoken_services.supervisor.launchers.forks import ForkServer
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

log = logging.getLogger("xtoken.supervisor")

JOIN_POLL_S = 0.1
NOTHING_LEFT = "every step is trained and the model is written: nothing is left to do"

LauncherFactory = Callable[[RunSpec, Path], Launcher]
"""Creates the launcher of a run, given its specification and its private directory."""


class StoppedEarly(Exception):  # noqa: N818 - requested by the user, not a failure
    """The run was stopped before any of its processes was started."""


def launcher_factory(*, tied: bool, forks: Callable[[], ForkServer | None] = lambda: None) -> LauncherFactory:
    """Return a factory of the launchers that runs' settings name; see `LocalLauncher` for the arguments."""

    def create(spec: RunSpec, private: Path) -> Launcher:
        if spec.workers.launcher == "ray":
            from xtoken_services.supervisor.launchers.ray import RayLauncher

            return RayLauncher(spec, private, tied=tied)
        return LocalLauncher(tied=tied, private=[private], forks=forks())

    return create


def resolve(
    spec: RunSpec, progress: Callable[[str, float], None], divided_as: RunSpec | None = None
) -> tuple[ResolvedRun, list[str]]:
    """Return the run with what its files say, and warnings about its settings; see `resolve_run`."""
    check_input_files(spec)
    # Missing files are reported above, before these imports: they take longer than starting Python.
    from xtoken_services.common.run.resolve import file_warnings, resolve_run

    resolved = resolve_run(spec, progress, divided_as=divided_as)
    return resolved, list(file_warnings(resolved))


class SupervisedRun:
    """One start of a run, in a thread of its own.

    The supervisor never runs in the caller's main thread: there, a terminal that blocks would keep it from its workers.

    Attributes:
        started: Set once its files are checked, or the check has failed.
        over: Set once nothing more is done about it here: it has ended, or was left to continue without a supervisor.
        result: How it ended; None while it runs, and if it was left.
        refusal: The error that the check of its files raised, if that ended it.

    Args:
        spec: What to run; its paths are absolute.
        status: The run before this start; its id is in the marks of its processes.
        launchers: Creates its launcher.
        events: Observer of its supervisor.
        environment: Variables to add to the environment of every process.
        loss: `module:Class` of a custom loss, for the trainers' command lines.
    """

    def __init__(
        self,
        spec: RunSpec,
        status: RunStatus,
        launchers: LauncherFactory,
        *,
        events: SupervisorEvents | None = None,
        environment: Mapping[str, str] | None = None,
        loss: str | None = None,
    ) -> None:
        self.id, self.spec = status.id, spec
        self.started, self.over = threading.Event(), threading.Event()
        self.result: RunResult | None = None
        self.refusal: XtokenError | None = None
        self._launchers, self._events = launchers, events or SupervisorEvents()
        self._environment = dict(environment or {})
        self._loss = loss
        self._divided_as: RunSpec | None = None
        self._supervisor: Supervisor | None = None
        self._stop_requested = self._detach_requested = False
        self._status = status
        self._over_at = 0.0
        self._ended_at: int | None = None
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
            self._stop_requested = True
            self._events.state_changed(RunState.STOPPING)
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
                if (self._stop_requested or self._detach_requested) and self._supervisor is None:
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
        result = self.result
        if result is not None:
            end = {"state": result.state, "error": result.error, "exit_code": result.exit_code}
            taken = {} if self._ended_at is None else {"step": self._ended_at}
            return status.model_copy(update=end | taken)
        if self._stop_requested:
            return status.model_copy(update={"state": RunState.STOPPING})
        if status.state.over:
            # The supervisor has ended the run, and this thread still removes its sockets and shared memory.
            return status.model_copy(update={"state": RunState.RUNNING, "error": ""})
        return status

    def _note(self, **known: Any) -> None:
        """Replace fields of the status that is shown before there is a supervisor."""
        self._status = self._status.model_copy(update=known)

    # In its own thread

    def _work(self) -> None:
        result: RunResult | None = RunResult(RunState.FAILED, SUPERVISOR_FAILED, 1)
        try:
            with sole_writer(self.spec.output, self.id):
                result = self._run()
        except StoppedEarly:
            result = RunResult(RunState.STOPPED, "", 130)
        except XtokenError as error:
            self.refusal = error
            result = RunResult(RunState.FAILED, str(error), error.exit_code)
        except OSError as error:
            result = RunResult(RunState.FAILED, f"cannot start the run: {error}", 1)
        except Exception:
            log.exception("run %s: %s", self.id, SUPERVISOR_FAILED)
        finally:
            self._finish(result)

    def _run(self) -> RunResult | None:
        """Run from the specification; a subclass may attach to processes that exist already."""
        output = self.spec.output
        try:
            resolved, warnings = self._resolve()
        except XtokenError as error:
            if not (output / FILE).exists():  # the record of an earlier start says more than a refusal
                write_record(output, RunRecord.of(RunResult(RunState.FAILED, str(error), error.exit_code)))
            raise
        step = check_output(resolved)  # before anything is written: another run's files stay as they are
        ended_early = has_ended_early(output, step)
        if (step >= resolved.steps or ended_early) and is_finished(self.spec):
            return self._already_finished(resolved)
        if ended_early:
            (output / SUMMARY).unlink()  # the run resumes, with other settings: it has no summary yet
        write_json(output / SPEC, self.spec.model_dump(mode="json"))
        write_json(output / "resolved.json", resolved.model_dump(mode="json"))
        for warning in warnings:
            self._events.message(warning)
            log.warning("%s", warning)
        queues = QueueDirectory.create(self.spec)
        self._events.queues_assigned(queues.to_document())
        self._events.progressed(step, resolved.steps)
        return self._supervise(resolved, queues, self._launchers(self.spec, queues.private), {}, step)

    def _resolve(self) -> tuple[ResolvedRun, list[str]]:
        """Return the run with what its files say, and warnings; a subclass may read them in another process."""
        return resolve(self.spec, self._note_check, self._divided_as)

    def _already_finished(self, resolved: ResolvedRun) -> RunResult:
        """Complete without any process: an earlier start has trained every step and written the model."""
        output = self.spec.output
        self._events.progressed(resolved.steps, resolved.steps)
        self._events.message(NOTHING_LEFT)
        log.warning("%s: %s", output, NOTHING_LEFT)
        self._note(step=resolved.steps, steps=resolved.steps)
        result = RunResult(RunState.COMPLETED)
        end = RunRecord.of(result).model_dump(exclude_unset=True)
        write_record(output, read_record(output).model_copy(update=end))
        return result

    def _note_check(self, activity: str, done: float) -> None:
        from xtoken_services.common.run.resolve import READING  # not at the top: it imports the data readers

        if activity == READING:
            self._note(text_read=done, checking="")
        else:
            self._note(text_read=None, checking=f"{activity}: {done:.0%}")
        if self._stop_requested:  # reading a large text for the first time takes minutes
            raise StoppedEarly

    def _supervise(
        self,
        resolved: ResolvedRun,
        queues: QueueDirectory,
        launcher: Launcher,
        recovered: Mapping[str, RecoveredGroup],
        step: int,
    ) -> RunResult | None:
        workers = self.spec.workers
        limits = Limits(
            max_restarts=workers.max_restarts, load_timeout_s=workers.load_timeout_s, grace_s=workers.stop_timeout_s
        )
        result: RunResult | None = RunResult(RunState.FAILED, SUPERVISOR_FAILED, 1)
        try:
            supervisor = Supervisor(
                self._status.model_copy(update={"step": step, "steps": resolved.steps}),
                self._process_specs(resolved, queues),
                queues.addresses,
                launcher,
                limits,
                events=self._events,
                recovered=recovered,
            )
            with self._lock:  # a request that came before there was a supervisor
                self._supervisor = supervisor
                if self._stop_requested:
                    supervisor.stop()
                if self._detach_requested:
                    supervisor.detach()
            self.started.set()
            result = supervisor.run()
            return result
        finally:
            if result is not None:
                self._clean_up(queues, launcher)
            else:
                launcher.close()

    def _clean_up(self, queues: QueueDirectory, launcher: Launcher) -> None:
        launcher.kill_marked(f"{self.id}/")
        launcher.close()
        queues.remove()
        remove_stale_files()

    def _process_specs(self, resolved: ResolvedRun, queues: QueueDirectory) -> tuple[ProcessSpec, ...]:
        specs = build_process_specs(resolved, self.spec.output / "resolved.json", queues.addresses, self._loss)
        return tuple(dataclasses.replace(spec, env={**spec.env, **self._environment}) for spec in specs)

    def _finish(self, result: RunResult | None) -> None:
        if result is not None and result.state == RunState.COMPLETED:
            self._ended_at = step_of_early_end(self.spec.output)  # a queue counts the steps that were left out as done
        with self._lock:
            self.result = result
            if result is not None:
                if self._ended_at is not None:
                    self._events.progressed(self._ended_at, self.status().steps or self._ended_at)
                self._events.ended(result.state, result.error, result.exit_code)
        outcome = f"{result.state} {result.error}".strip() if result else "left to continue without a supervisor"
        log.info("run %s: %s", self.id, outcome)
        self._over_at = time.monotonic()
        self.started.set()
        self.over.set()
