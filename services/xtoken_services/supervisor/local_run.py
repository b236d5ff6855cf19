"""One run from start to end in this process: what `xtoken run` and `xtoken demo` do."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import XtokenError
from xtoken_services.common.files.directory_lock import OccupiedError
from xtoken_services.common.run.custom_loss import check_custom_loss, check_importable
from xtoken_services.common.run.resume import CHECKPOINTS, newest_checkpoint
from xtoken_services.common.run.status import RunState, RunStatus
from xtoken_services.supervisor.interrupts import POLL_S, Interrupts
from xtoken_services.supervisor.json_files import best_line, first_line, last_line, read_json
from xtoken_services.supervisor.launch_check import check_launch
from xtoken_services.supervisor.launchers.forks import ForkServer, fork_server_of_run
from xtoken_services.supervisor.progress import STOPPING, STOPPING_NOW, FailsafeView, ProgressView, open_view
from xtoken_services.supervisor.run_directory import OutputBefore
from xtoken_services.supervisor.run_record import SUMMARY, RunResult
from xtoken_services.supervisor.supervised_run import LauncherFactory, SupervisedRun, launcher_factory

log = logging.getLogger("xtoken.supervisor")

QUIET_S = 1.0
"""Time for the check of a run's files before anything is displayed: most errors are reported within it."""


def run_locally(
    spec: RunSpec,
    *,
    show: bool = True,
    as_json: bool = False,
    launchers: LauncherFactory | None = None,
    loss: str | None = None,
    view: ProgressView | None = None,
    forks: ForkServer | None = None,
    kind: type[LocalRun] | None = None,
) -> RunResult:
    """Run to the end.

    SIGINT, SIGTERM and SIGHUP request a graceful shutdown, a second one an immediate one. If this process is killed, an
    orphan reaper kills the run's processes.

    Args:
        spec: What to run; its paths are absolute.
        show: Whether to print progress and the summary.
        as_json: Whether to print statuses instead, one object a line.
        launchers: Creates the run's launcher; one that its settings name if left out.
        loss: `module:Class` of a custom loss.
        view: Shows the run's progress; None: the console, as `show` and `as_json` say.
        forks: Server to fork the workers from, which is closed at the end; None: started if one can be used.
        kind: Class of the run, if not `LocalRun`.

    Returns:
        How it ended; `exit_code` is 128 + N if signal N stopped it.

    Raises:
        XtokenError: The run's files or settings were refused before any process was started.
    """
    before = OutputBefore.of(spec.output)
    try:
        check_launch(spec)
        check_custom_loss(spec.loss, loss)
        if loss is not None:
            check_importable(loss)
    except XtokenError:
        before.discard()
        raise
    return run_to_end((kind or LocalRun)(spec, launchers, loss, forks), show=show, as_json=as_json, view=view)


def run_to_end(
    run: LocalRun, *, show: bool = True, as_json: bool = False, view: ProgressView | None = None
) -> RunResult:
    """Start a run and show its progress until it is over; arguments, result and errors as of `run_locally`."""
    with Interrupts() as interrupts:
        run.start()
        try:
            run.started.wait(QUIET_S)
            with nullcontext(view) if view else open_view(show, as_json=as_json) as shown:
                follow(run, FailsafeView(shown), interrupts)
        finally:
            _shut_down(run, interrupts)
            run.close()
    result = run.result
    assert result is not None, "a local run is never left"
    if run.refusal is not None:
        if not isinstance(run.refusal, OccupiedError):
            run.before.discard()
        raise run.refusal
    if result.state == RunState.STOPPED:  # what the stop has lost is in the view's last line
        return dataclasses.replace(result, error="", exit_code=interrupts.status or result.exit_code)
    return result


class LocalRun(SupervisedRun):
    """A run without a control plane: its status is put together from its supervisor and its files.

    Its workers are forked from a server that imports while the files are checked. A control plane's are not: they may
    outlive it.

    Args:
        spec: What to run.
        launchers: Creates the run's launcher.
        loss: `module:Class` of a custom loss.
        forks: A server that has been started already.
    """

    def __init__(
        self,
        spec: RunSpec,
        launchers: LauncherFactory | None,
        loss: str | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        factory = launchers or launcher_factory(tied=True, forks=lambda: self._forks)
        status = RunStatus.starting(spec, f"{spec.name}-{secrets.token_hex(4)}")
        super().__init__(spec, status, factory, loss=loss)
        self._wants_forks = launchers is None
        self._forks = forks if self._wants_forks and forks is not None and not forks.lost else None
        if forks is not None and self._forks is None:
            forks.close()
        self.before = OutputBefore.of(self.spec.output)
        self._best: tuple[tuple[int, int], dict[str, Any] | None] = (0, 0), None

    def close(self) -> None:
        """End the server that its workers are forked from, once none of them is left."""
        if self._forks is not None:
            self._forks.close()

    def _resolve(self) -> tuple[ResolvedRun, list[str]]:
        """Return the run with what its files say, and warnings; start the fork server if its files are there."""
        if self._wants_forks and self._forks is None:
            self._forks = fork_server_of_run(self.spec)
        return super()._resolve()

    def shown(self) -> RunStatus:
        """Return the status with what the run's files say."""
        output, status = self.spec.output, self.status()
        checkpoint = newest_checkpoint(output / CHECKPOINTS)
        completed = status.state == RunState.COMPLETED
        return status.model_copy(
            update={
                "ended": _now() if self.over.is_set() else None,
                "last": last_line(output / "steps.jsonl"),
                "evaluation": last_line(output / "eval.jsonl"),
                "first_evaluation": first_line(output / "eval.jsonl"),
                "best_evaluation": self._best_evaluation(output / "eval.jsonl"),
                "checkpoint": int(checkpoint.name.removeprefix("step-")) if checkpoint is not None else None,
                "summary": read_json(output / SUMMARY) if completed else None,
            }
        )

    def _best_evaluation(self, file: Path) -> dict[str, Any] | None:
        """Return the best line of `eval.jsonl`, which is read again once it has changed."""
        try:
            state = file.stat()
        except OSError:
            return None
        read = state.st_size, state.st_mtime_ns
        if self._best[0] != read:
            self._best = read, best_line(file)
        return self._best[1]


def follow(run: LocalRun, view: ProgressView, interrupts: Interrupts) -> None:
    """Show a run until it is over, and turn signals into requests to stop."""
    seen = 0
    while not run.over.is_set():
        view.show(run.shown())
        run.over.wait(POLL_S)
        if interrupts.count > seen:
            seen = interrupts.count
            view.stopping(now=seen > 1)
            run.stop(now=seen > 1)
    if run.refusal is None:
        view.end(run.shown())


def _shut_down(run: SupervisedRun, interrupts: Interrupts) -> None:
    """Wait until the run is over; one that is not, because following it has failed, is stopped gracefully."""
    seen = interrupts.count
    if not run.over.is_set():
        log.warning("the run cannot be followed any more: %s", STOPPING_NOW if seen > 1 else STOPPING)
        run.stop(now=seen > 1)
    while not run.over.wait(POLL_S):
        if interrupts.count > seen:
            run.stop(now=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
