"""Showing a run's progress: live on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeGuard

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.supervisor.run_record import RunState

log = logging.getLogger("xtoken.control")

LINE_EVERY_S = 5.0
STOPPING = "stopping in order; once more to stop at once"
STOPPING_NOW = "stopping at once: what is in no checkpoint yet is lost"
LOADING, READY = "load", "run"
NAMED = 4
BAR = 24
LOSSES = ("loss", "ce_loss", "kl_loss")
UNSHOWN = (*LOSSES, "step", "time", "seconds", "tokens", "tokens_per_second")
STATE_STYLES = {"running": "green", "finished": "dim", "waiting": "yellow", "stopped": "dim"}


class Watch(Protocol):
    """Somewhere to show a run; statuses are those of `GET /v1/runs/{id}`."""

    def show(self, status: dict[str, Any]) -> None:
        """The run goes on."""
        ...

    def stopping(self, *, now: bool) -> None:
        """The user has asked to stop."""
        ...

    def end(self, status: dict[str, Any]) -> None:
        """The run is over."""
        ...


@contextmanager
def watch_for(show: bool, console: Console | None = None, *, as_json: bool = False) -> Iterator[Watch]:
    """What suits where the output goes; nothing is printed unless `show`, and one object a line with `as_json`."""
    console = console or Console(quiet=not show)
    if show and as_json:
        yield JsonWatch()
    elif show and console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            yield LiveWatch(live)
    else:
        yield LineWatch(console)


class SteadyWatch:
    """Another watch, whose failures end nothing: training goes on where it cannot be shown."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._failed = False

    def show(self, status: dict[str, Any]) -> None:
        """Show it if that can be done."""
        self._try(lambda: self._watch.show(status))

    def stopping(self, *, now: bool) -> None:
        """Say so if that can be done."""
        self._try(lambda: self._watch.stopping(now=now))

    def end(self, status: dict[str, Any]) -> None:
        """Show the end if that can be done."""
        self._try(lambda: self._watch.end(status))

    def _try(self, show: Callable[[], None]) -> None:
        try:
            show()
        except (Exception, SystemExit) as error:  # rich leaves by SystemExit where nobody reads the pipe any more
            if not self._failed:
                self._failed = True
                log.warning("the run goes on, but cannot be shown: %s: %s", type(error).__name__, error)


class LiveWatch:
    """A picture that renews itself."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._note = ""

    def show(self, status: dict[str, Any]) -> None:
        """Renew the picture."""
        self._live.update(picture(status, self._note))

    def stopping(self, *, now: bool) -> None:
        """Say so below the picture."""
        self._note = STOPPING_NOW if now else STOPPING

    def end(self, status: dict[str, Any]) -> None:
        """Leave the summary in place of the picture."""
        self._live.update(Text(""))
        self._live.console.print(ending_line(status), markup=False, highlight=False)


class News:
    """Tells when a status is worth a line: the state has changed, or steps were taken and some seconds have passed."""

    def __init__(self) -> None:
        self._said: tuple[Any, ...] = ()
        self._said_at = 0.0

    def has(self, status: dict[str, Any]) -> bool:
        """Whether there is news since this was last true."""
        news = (status["state"], [(w["name"], w["state"], w["restarts"]) for w in status["workers"]])
        done = (status["step"], status.get("text_read"), _unready(status))
        due = time.monotonic() - self._said_at >= LINE_EVERY_S and done != self._said[2:]
        if news == self._said[:2] and not due:
            return False
        self._said, self._said_at = (*news, *done), time.monotonic()
        return True


class JsonWatch:
    """The status as one line of JSON on standard output whenever there is news; the last line is how it ended."""

    def __init__(self) -> None:
        self._news = News()

    def show(self, status: dict[str, Any]) -> None:
        """Print it if there is news."""
        if self._news.has(status):
            self.end(status)

    def stopping(self, *, now: bool) -> None:
        """The status will say so."""

    def end(self, status: dict[str, Any]) -> None:
        """Print it."""
        sys.stdout.write(json.dumps(status) + "\n")
        sys.stdout.flush()


class LineWatch:
    """A line whenever the state changes, and every few seconds while steps are taken."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._news = News()

    def show(self, status: dict[str, Any]) -> None:
        """Print a line if it is time for one."""
        if self._news.has(status):
            self._print(progress_line(status))

    def stopping(self, *, now: bool) -> None:
        """Print it."""
        self._print(STOPPING_NOW if now else STOPPING)

    def end(self, status: dict[str, Any]) -> None:
        """Print the last line."""
        self._print(ending_line(status))

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def progress_line(status: dict[str, Any]) -> str:
    """One line on where a run stands."""
    parts = [f"{status['name']}: {status['state']}", _done(status)]
    parts += [f"{name} {value}" for name, value in metrics_of(status)]
    if status["queue"]:
        parts.append(f"queue {status['queue']['samples']} samples")
    if names := _unready(status):
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        parts.append(f"waiting for {', '.join(names[:NAMED])}{more} to load")
    workers = [f"{w['name']} {w['state']}{_restarts(w)}" for w in status["workers"] if _worth_telling(w)]
    return ", ".join(parts + workers)


def _unready(status: dict[str, Any]) -> list[str]:
    """Workers that were started and have not said yet that they can work; what they say is seconds old."""
    if status["state"] not in (RunState.STARTING, RunState.RUNNING) or status["step"] == status["steps"]:
        return []
    workers = [w for w in status["workers"] if w["kind"] != "queue" and w["state"] == "running"]
    if any(w["kind"] == "trainer" and w["phase"] == READY for w in workers):  # all have begun: who has no phase leaves
        return [w["name"] for w in workers if w["phase"] == LOADING and w["restarts"]]
    if status["last"] and status["last"].get("step", 0) >= (status["step"] or 0):  # it has trained since the last look
        return []
    filled = bool(status["queue"] and status["queue"]["samples"])
    return [w["name"] for w in workers if w["phase"] != READY and not (filled and w["kind"] == "collator")]


def _done(status: dict[str, Any]) -> str:
    """How far a run is: its steps, or before them what is being checked."""
    if status["steps"] is None and not RunState(status["state"]).over:
        read = status.get("text_read")
        return "checking models, tokenizers and text" if read is None else f"{read:.0%} of the text read"
    return f"step {status['step'] or 0}/{status['steps'] or '?'}"


def ending_line(status: dict[str, Any]) -> str:
    """One line on how a run ended."""
    if not RunState(status["state"]).over:
        return f"{status['name']} goes on: xtoken runs show {status['id']}"
    where = f"{status['name']}: {status['state']} after step {status['step'] or 0} of {status['steps'] or '?'}"
    if status["state"] == "stopped":
        lost = f": {status['error']}" if status["error"] else ""
        return f"{where}{lost}; {_way_on(status)}"
    summary = status["summary"]
    if status["state"] != "completed" or summary is None:
        return f"{where}; logs are in {status['output']}/logs"
    counts = ", ".join(
        f"{summary[name]} {name}" for name in ("trained", "skipped", "dead", "truncated") if name in summary
    )
    bits = (status["evaluation"] or {}).get("bits_per_byte")
    held_out = f"; {bits:.4f} bits per byte on held-out text" if _is_number(bits) else ""
    return f"{where}: {counts} of {summary.get('positions')} samples{held_out}; model in {status['output']}/model"


def _way_on(status: dict[str, Any]) -> str:
    """What starting a stopped run again goes on from."""
    step, checkpoint = status["step"] or 0, status["checkpoint"]
    if checkpoint is None:
        lost = "what was trained is lost" if step else "nothing was trained"
        return f"there is no checkpoint in {status['output']}, {lost}: started again, it begins anew"
    lost = f", the {count_of(step - checkpoint, 'step')} after it being lost" if step > checkpoint else ""
    return f"start it again to go on from its last checkpoint, of step {checkpoint}, in {status['output']}{lost}"


def count_of(count: int, what: str) -> str:
    """So many of something, in the right number."""
    return f"{count} {what}{'s' if count != 1 else ''}"


def metrics_of(status: dict[str, Any]) -> list[tuple[str, str]]:
    """The last step's losses and speed, and the last reading of the held-out text, as names and figures."""
    last = status["last"] or {}
    found = [(name, f"{value:.4f}") for name in LOSSES if _is_number(value := last.get(name))]
    if _is_number(speed := last.get("tokens_per_second")):
        found.append(("tokens/s", f"{speed:,.0f}"))
    bits = (status["evaluation"] or {}).get("bits_per_byte")
    return [*found, ("bits per byte", f"{bits:.4f}")] if _is_number(bits) else found


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether it can be shown: what was not finite is null in a run's curves."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def picture(status: dict[str, Any], note: str) -> RenderableType:
    """Where a run stands: progress, losses and their parts, queue, workers."""
    step, steps = status["step"] or 0, status["steps"] or 0
    head = Table.grid(padding=(0, 2))
    completed = step if steps else status.get("text_read") or 0
    bar = ProgressBar(total=steps or 1, completed=completed, width=BAR)
    head.add_row(Text(status["name"], style="bold", overflow="fold"), status["state"], bar, _done(status))
    parts = [head, _figures(status), _workers(status)]
    return Group(*parts, Text(note, style="yellow")) if note else Group(*parts)


def _figures(status: dict[str, Any]) -> RenderableType:
    """As many beside each other as the width has room for, none cut."""
    last = status["last"] or {}
    others = [(k, f"{v:.4g}") for k, v in last.items() if k not in UNSHOWN and _is_number(v)]
    parts: list[RenderableType] = [
        Columns((_figure(*each) for each in figures), padding=(0, 2)) for figures in (metrics_of(status), others)
    ]
    if status["queue"]:
        held, limit = status["queue"]["bytes"] / 2**20, status["queue"]["memory_limit"] / 2**20
        parts.append(_figure("queue", f"{status['queue']['samples']} samples, {held:.1f}/{limit:.0f} MiB"))
    return Group(*parts)


def _figure(name: str, value: str) -> Text:
    return Text.assemble((name, "dim"), f" {value}", overflow="fold")


def _workers(status: dict[str, Any]) -> Table:
    """A row each; a column that no worker has anything in is left out."""
    rows = [_worker(worker) for worker in status["workers"]]
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    shown = [name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)]
    for name in shown:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    return table


def _worker(worker: dict[str, Any]) -> dict[str, Text]:
    age = worker["heartbeat_age_s"]
    told = {
        "worker": worker["name"],
        "state": worker["state"],
        "pid": str(worker["pid"] or ""),
        "phase": worker["phase"],
        "work": str(worker["progress"] or ""),
        "heard": "" if age is None else f"{age:.0f} s ago",
        "restarts": str(worker["restarts"] or ""),
    }
    style = STATE_STYLES.get(worker["state"], "")
    return {name: Text(value, style=style if name == "state" else "") for name, value in told.items()}


def _worth_telling(worker: dict[str, Any]) -> bool:
    return bool(worker["state"] != "running" or worker["restarts"])


def _restarts(worker: dict[str, Any]) -> str:
    count = worker["restarts"]
    return f" ({count_of(count, 'restart')})" if count else ""
