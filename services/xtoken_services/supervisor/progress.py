"""Progress display of a run: live on a terminal, a line every few seconds elsewhere, or JSON lines."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from xtoken_services.common.run.metric_lines import BITS, TEACHER_BITS, covered, finite, task_accuracy, with_error
from xtoken_services.common.run.quantities import span
from xtoken_services.common.run.run_warnings import warnings_of
from xtoken_services.common.run.status import RunState, RunStatus, WorkerStatus, goes_by_tasks

log = logging.getLogger("xtoken.supervisor")

LINE_EVERY_S = 5.0
WARNING = "warning: "
STOPPING = "Shutting down gracefully; press Ctrl+C again to force quit"
STOPPING_NOW = "Force quit: progress since the last checkpoint is lost"
LOADING, READY = "load", "run"
LOADING_ACTIVITY = "loading"
MOST_NAMES = 4
BAR_WIDTH = 24
LOSSES = ("loss", "ce_loss", "kl_loss")
HIDDEN_METRICS = (*LOSSES, "step", "time", "seconds", "tokens", "tokens_per_second", "skipped_total", "truncated_total")
HIDDEN_PREFIXES = ("chunk_kl_", "chunk_count_", "text_")
STATE_STYLES = {"running": "green", "finished": "dim", "waiting": "yellow", "stopped": "dim"}


class ProgressView(Protocol):
    """A display of one run; statuses are those of `GET /v1/runs/{id}`."""

    def show(self, status: RunStatus) -> None:
        """Display the status of a run that is not over."""

    def stopping(self, *, now: bool) -> None:
        """Display that the user has requested a graceful shutdown, or with `now` an immediate one."""

    def end(self, status: RunStatus) -> None:
        """Display how the run ended."""


@contextmanager
def open_view(show: bool, console: Console | None = None, *, as_json: bool = False) -> Iterator[ProgressView]:
    """Open the view that suits the output.

    Args:
        show: Whether anything is printed; otherwise lines are logged.
        console: Console to print to; standard output if left out.
        as_json: Whether statuses are printed as JSON, one object a line.
    """
    console = console or Console()
    if not show:
        yield LogView(console)
    elif as_json:
        yield JsonView()
    elif console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            yield LiveView(live)
    else:
        yield LineView(console)


class FailsafeView:
    """A view whose failures are logged once and ignored, so that training continues without a display."""

    def __init__(self, view: ProgressView) -> None:
        self._view = view
        self._failed = False

    def show(self, status: RunStatus) -> None:
        """Display the status."""
        self._try(lambda: self._view.show(status))

    def stopping(self, *, now: bool) -> None:
        """Display that the run is being stopped."""
        self._try(lambda: self._view.stopping(now=now))

    def end(self, status: RunStatus) -> None:
        """Display how the run ended."""
        self._try(lambda: self._view.end(status))

    def _try(self, show: Callable[[], None]) -> None:
        try:
            show()
        except (Exception, SystemExit) as error:  # rich raises SystemExit when the pipe is closed
            if not self._failed:
                self._failed = True
                log.warning("the run continues, but cannot be displayed: %s: %s", type(error).__name__, error)


class LiveView:
    """A display that is redrawn in place."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._note = ""

    def show(self, status: RunStatus) -> None:
        """Redraw it."""
        self._live.update(render_status(status, self._note))

    def stopping(self, *, now: bool) -> None:
        """Add a line below it."""
        self._note = STOPPING_NOW if now else STOPPING

    def end(self, status: RunStatus) -> None:
        """Replace it by the summary."""
        self._live.update(Text(""))
        for line in [*_warning_lines(status), final_line(status)]:
            self._live.console.print(line, markup=False, highlight=False)


class ChangeDetector:
    """Decides when a status is worth a line: on a change of state or of a phase before any step, or after seconds."""

    def __init__(self) -> None:
        self._last: tuple[Any, ...] = ()
        self._last_at = 0.0
        self._phases: set[str] = set()

    def changed(self, status: RunStatus) -> bool:
        """Return whether the status is worth a line since the last one that was."""
        state = (status.state, [(w.name, w.state, w.restarts) for w in status.workers])
        progress = (status.step, status.text_read, [*_unready(status), *(w.activity for w in _busy(status))])
        due = time.monotonic() - self._last_at >= LINE_EVERY_S and progress != self._last[2:]
        texts = [] if status.step else [status.checking, *(w.activity for w in status.workers)]
        phases = {re.sub(r"\d+", "", text) for text in texts if text}
        if state == self._last[:2] and not due and phases <= self._phases:
            return False
        self._phases |= phases
        self._last, self._last_at = (*state, *progress), time.monotonic()
        return True


class JsonView:
    """Statuses as lines of JSON on standard output, whenever they have changed; the last line is the run's end."""

    def __init__(self) -> None:
        self._changes = ChangeDetector()

    def show(self, status: RunStatus) -> None:
        """Print the status if it has changed."""
        if self._changes.changed(status):
            self.end(status)

    def stopping(self, *, now: bool) -> None:
        """Print nothing: the next status shows it."""

    def end(self, status: RunStatus) -> None:
        """Print the status."""
        sys.stdout.write(json.dumps(status.document()) + "\n")
        sys.stdout.flush()


class LineView:
    """A line on every change of state, and every few seconds while steps are taken."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._changes = ChangeDetector()
        self._warned: set[str] = set()

    def show(self, status: RunStatus) -> None:
        """Print a line if the status has changed, and every warning once."""
        if self._changes.changed(status):
            self._print(status_line(status))
        self._warn(status)

    def stopping(self, *, now: bool) -> None:
        """Print that the run is being stopped."""
        self._print(STOPPING_NOW if now else STOPPING)

    def end(self, status: RunStatus) -> None:
        """Print how the run ended, after what was not said to be wrong with it."""
        self._warn(status)
        self._print(final_line(status))

    def _warn(self, status: RunStatus) -> None:
        warnings = warnings_of(status)
        for name in [name for name in warnings if name not in self._warned]:
            self._print(f"{WARNING}{warnings[name]}")
        self._warned |= warnings.keys()

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LogView(LineView):
    """The same lines in this process's log."""

    def _print(self, line: str) -> None:
        log.log(logging.WARNING if line.startswith(WARNING) else logging.INFO, "%s", line.removeprefix(WARNING))


def status_line(status: RunStatus) -> str:
    """Return a run's status in one line."""
    parts = [f"{status.name}: {status.state}", _progress(status)]
    parts += [f"{name} {value}" for name, value in metrics_of(status)]
    if status.queue:
        parts.append(f"queue {status.queue.samples} samples")
    if names := _unready(status):
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        parts.append(f"waiting for {', '.join(names[:MOST_NAMES])}{more} to load")
    parts += [f"{w.name} {w.activity}" for w in _busy(status)]
    parts += _left(status)
    workers = [f"{w.name} {w.state}{_restarts(w)}" for w in status.workers if w.state != "running" or w.restarts]
    return ", ".join(parts + workers)


def _left(status: RunStatus) -> list[str]:
    return [f"about {span(math.ceil(left))} left"] if (left := status.remaining_s()) else []


def _busy(status: RunStatus) -> list[WorkerStatus]:
    """Return the workers that do something other than steps for long, such as evaluating."""
    active = [w for w in status.workers if w.state == "running" and w.activity]
    return [w for w in active if w.phase != LOADING or w.activity.startswith("evaluating")]


def _unready(status: RunStatus) -> list[str]:
    """Return the workers that are loading; phases are seconds old, so later evidence of work overrules them."""
    if status.state not in (RunState.STARTING, RunState.RUNNING) or status.step == status.steps:
        return []
    workers = [w for w in status.workers if w.kind != "queue" and w.state == "running"]
    workers = [w for w in workers if w not in _busy(status)]
    # All were ready once: one without a phase is exiting.
    if any(w.kind == "trainer" and w.phase == READY for w in status.workers):
        return [w.name for w in workers if w.phase == LOADING and w.restarts]
    if status.last and status.metrics.get("step", 0) >= (status.step or 0):  # it has trained since the last poll
        return []
    filled = bool(status.queue and status.queue.samples)
    return [_loading(w) for w in workers if w.phase != READY and not (filled and w.kind == "collator")]


def _loading(worker: WorkerStatus) -> str:
    says_what = worker.activity not in ("", LOADING_ACTIVITY)
    return f"{worker.name} ({worker.activity})" if says_what else worker.name


def _progress(status: RunStatus) -> str:
    """Return a run's steps, or before them what is being checked."""
    if status.steps is None and not status.state.over:
        if status.checking:
            return status.checking
        read = status.text_read
        return "checking models, tokenizers and text" if read is None else f"{read:.0%} of the text read"
    return f"step {status.step or 0}/{status.steps or '?'}"


def final_line(status: RunStatus) -> str:
    """Return how a run ended in one line."""
    if not status.state.over:
        return f"{status.name} is still running: xtoken runs show {status.id}"
    where = f"{status.name}: {status.state} after step {status.step or 0} of {status.steps or '?'}"
    if status.state == "stopped":
        lost = f": {status.error}" if status.error else ""
        return f"{where}{lost}; {_resume_hint(status)}"
    summary = status.summary
    if status.state != "completed" or summary is None:
        return f"{where}; logs are in {status.output}/logs"
    early = f" (ended early: {summary['stopped_early']})" if "stopped_early" in summary else ""
    step = summary.get("steps", status.step)
    where = f"{status.name}: {status.state} after step {step} of {status.steps}{early}"
    counts = ", ".join(
        f"{summary[name]} {name}" for name in ("trained", "skipped", "dead", "truncated") if name in summary
    )
    held_out = _held_out(status)
    return f"{where}: {counts} of {summary.get('positions')} samples{held_out}; model in {status.output}/model"


def _held_out(status: RunStatus) -> str:
    """Return the held-out result of the exported weights, and its change since step 0; empty without one."""
    exported = finite(status.exported)
    if BITS not in exported:
        return ""
    which, step = "", exported.get("step")
    if status.keeps_best:  # the step of the reported evaluation need not be the last one
        is_best = step == finite(status.best_evaluation).get("step")
        which = f" after step {step}" + (f", the {_best(status)}" if is_best else "")
    change = "" if status.change is None else f" (since step 0: {status.change})"
    if status.of_teacher:
        change += f"; {status.of_teacher}"
        if (share := covered(status.first_evaluation, exported)) is not None:
            change += f", {share:.0%} of the distance to it is covered" if share <= 1 else ", the student has passed it"
    return f"; {with_error(exported)} bits per byte on held-out text{which}{change}"


def _best(status: RunStatus) -> str:
    """Return the name of the best evaluation; the one by tasks need not have the fewest bits per byte."""
    return "best by tasks" if goes_by_tasks(status.spec) else "best"


def _resume_hint(status: RunStatus) -> str:
    """Return where a stopped run resumes."""
    step, checkpoint = status.step or 0, status.checkpoint
    if checkpoint is None:
        lost = "what was trained is lost" if step else "nothing was trained"
        return f"there is no checkpoint in {status.output}, {lost}: a rerun starts from the beginning"
    lost = f" ({plural(step - checkpoint, 'step')} after it lost)" if step > checkpoint else ""
    return f"rerun to resume from the checkpoint of step {checkpoint} in {status.output}{lost}"


def plural(count: int, what: str) -> str:
    """Return a count with its noun in the singular or plural."""
    return f"{count} {what}{'s' if count != 1 else ''}"


def metrics_of(status: RunStatus) -> list[tuple[str, str]]:
    """Return names and values of the last step's losses and speed, of the last evaluation, and of one that is kept."""
    last, evaluation, best = status.metrics, finite(status.evaluation), finite(status.best_evaluation)
    metrics = [(name, f"{last[name]:.4f}") for name in LOSSES if name in last]
    if "tokens_per_second" in last:
        metrics.append(("tokens/s", f"{last['tokens_per_second']:,.0f}"))
    if BITS in evaluation:
        metrics.append(("bits per byte", with_error(evaluation)))
    if TEACHER_BITS in evaluation:
        metrics.append(("teacher", f"{evaluation[TEACHER_BITS]:.4f}"))
    if (right := task_accuracy(evaluation)) is not None:
        metrics.append(("right on tasks", f"{right:.1%}"))
    if status.keeps_best and BITS in best:
        metrics.append((_best(status), f"{with_error(best, amount=False)} of step {best['step']}"))
    return metrics


def render_status(status: RunStatus, note: str) -> RenderableType:
    """Return a display of a run's progress, metrics, queue and workers, with a note below."""
    step, steps = status.step or 0, status.steps or 0
    head = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=steps or 1, completed=step if steps else status.text_read or 0, width=BAR_WIDTH)
    done = ", ".join([_progress(status), *_left(status)])
    head.add_row(Text(status.name, style="bold", overflow="fold"), status.state, bar, done)
    parts = [head, _metrics(status), _workers(status)]
    notes = [*_warning_lines(status), note] if note else _warning_lines(status)
    return Group(*parts, *(Text(line, style="yellow") for line in notes))


def _warning_lines(status: RunStatus) -> list[str]:
    return [f"{WARNING}{line}" for line in warnings_of(status).values()]


def _metrics(status: RunStatus) -> RenderableType:
    """Return metrics in as many columns as fit the width."""
    others = [(name, f"{value:.4g}") for name, value in status.metrics.items() if _is_shown(name)]
    parts: list[RenderableType] = [
        Columns((_metric(*item) for item in metrics), padding=(0, 2)) for metrics in (metrics_of(status), others)
    ]
    if status.queue:
        held, limit = status.queue.bytes / 2**20, status.queue.memory_limit / 2**20
        parts.append(_metric("queue", f"{status.queue.samples} samples, {held:.1f}/{limit:.0f} MiB"))
    return Group(*parts)


def _is_shown(name: str) -> bool:
    """Return whether a metric has a place of its own below the losses; those by class are too many, sums too large."""
    return name not in HIDDEN_METRICS and not name.startswith(HIDDEN_PREFIXES)


def _metric(name: str, value: str) -> Text:
    return Text.assemble((name, "dim"), f" {value}", overflow="fold")


def _workers(status: RunStatus) -> Table:
    """Return a table with a row per worker, without columns that are empty for all."""
    rows = [_worker(worker) for worker in status.workers]
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    shown = [name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)]
    for name in shown:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    return table


def _worker(worker: WorkerStatus) -> dict[str, Text]:
    age = worker.heartbeat_age_s
    cells = {
        "worker": worker.name,
        "state": worker.state,
        "pid": str(worker.pid or ""),
        "phase": worker.phase,
        "activity": worker.activity,
        "work": str(worker.progress or ""),
        "heartbeat": "" if age is None else f"{age:.0f} s ago",
        "restarts": str(worker.restarts or ""),
    }
    style = STATE_STYLES.get(worker.state, "")
    return {name: Text(value, style=style if name == "state" else "") for name, value in cells.items()}


def _restarts(worker: WorkerStatus) -> str:
    return f" ({plural(worker.restarts, 'restart')})" if worker.restarts else ""
