"""One run from start to end in this process: what `xtoken run` and `xtoken demo` do."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from functools import partial

from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import XtokenError
from xtoken_services.common.files.directory_lock import OccupiedError
from xtoken_services.common.run.loss_import import check_importable
from xtoken_services.common.run.status import RunState
from xtoken_services.supervisor.events import SupervisorEvents
from xtoken_services.supervisor.interrupts import POLL_S, Interrupts
from xtoken_services.supervisor.launch_check import check_launch
from xtoken_services.supervisor.progress import STOPPING, STOPPING_NOW, FailsafeView, ProgressView, open_view
from xtoken_services.supervisor.run import Prepared, Run, new_run, prepare_here
from xtoken_services.supervisor.run_directory import OutputBefore
from xtoken_services.supervisor.run_files import Curve, with_files
from xtoken_services.supervisor.run_record import RunResult

log = logging.getLogger("xtoken.supervisor")

QUIET_S = 1.0
"""Time for the check of a run's files before anything is displayed: most errors are reported within it."""


def run_locally(
    spec: RunSpec,
    *,
    show: bool = True,
    as_json: bool = False,
    loss: str | None = None,
    view: ProgressView | None = None,
    events: SupervisorEvents | None = None,
) -> RunResult:
    """Run to the end.

    SIGINT, SIGTERM and SIGHUP request a graceful shutdown, a second one an immediate one. If this process is killed, an
    orphan reaper kills the run's processes.

    Args:
        spec: What to run; its paths are absolute.
        show: Whether to print progress and the summary; otherwise they are logged.
        as_json: Whether to print statuses instead, one object a line.
        loss: `module:Class` of a custom loss.
        view: Another view of the run's progress.
        events: Observer of its supervisor.

    Returns:
        How it ended; `exit_code` is 128 + N if signal N stopped it.

    Raises:
        XtokenError: The run's files or settings were refused before any process was started.
    """
    before = OutputBefore.of(spec.output)
    try:
        check_launch(spec)
        check_importable(spec.loss, loss)
    except XtokenError:
        before.discard()
        raise
    run = new_run(spec, partial(_prepare, loss=loss), events)
    return run_to_end(run, show=show, as_json=as_json, view=view)


def run_to_end(run: Run, *, show: bool = True, as_json: bool = False, view: ProgressView | None = None) -> RunResult:
    """Start a run and show its progress until it is over; arguments, result and errors as of `run_locally`."""
    before = OutputBefore.of(run.spec.output)
    with Interrupts() as interrupts:
        run.start()
        try:
            run.started.wait(QUIET_S)
            with open_view(show, as_json=as_json) as shown:
                follow(run, [FailsafeView(each) for each in (shown, view) if each], interrupts)
        finally:
            _shut_down(run, interrupts)
    result = run.result
    assert result is not None, "a local run is never left"
    if run.refusal is not None:
        if not isinstance(run.refusal, OccupiedError):
            before.discard()
        raise run.refusal
    if result.state == RunState.STOPPED:  # what the stop has lost is in the view's last line
        return dataclasses.replace(result, error="", exit_code=interrupts.status or result.exit_code)
    return result


def _prepare(run: Run, *, loss: str | None) -> Prepared:
    """Prepare a run; one of which a teacher computes what its store lacks begins with the builds of its stores."""
    if not any(teacher.store is not None and teacher.store_missing == "compute" for teacher in run.spec.teacher):
        return prepare_here(run, loss=loss)
    from xtoken_services.supervisor.store_build import prepare_after_builds  # numpy, which other runs start without

    return prepare_after_builds(run, loss=loss)


def follow(run: Run, views: Sequence[ProgressView], interrupts: Interrupts) -> None:
    """Show a run until it is over, and turn signals into requests to stop."""
    steps, evaluations = (Curve(run.spec.output / name) for name in ("steps.jsonl", "eval.jsonl"))
    seen = 0
    while not run.over.is_set():
        status = with_files(run.status(), steps, evaluations)
        for view in views:
            view.show(status)
        run.over.wait(POLL_S)
        if interrupts.count > seen:
            seen = interrupts.count
            for view in views:
                view.stopping(now=seen > 1)
            run.stop(now=seen > 1)
    for view in views if run.refusal is None else ():
        view.end(with_files(run.status(), steps, evaluations))


def _shut_down(run: Run, interrupts: Interrupts) -> None:
    """Wait until the run is over; one that is not, because following it has failed, is stopped gracefully."""
    seen = interrupts.count
    if not run.over.is_set():
        log.warning("the run cannot be followed any more: %s", STOPPING_NOW if seen > 1 else STOPPING)
        run.stop(now=seen > 1)
    while not run.over.wait(POLL_S):
        if interrupts.count > seen:
            run.stop(now=True)
