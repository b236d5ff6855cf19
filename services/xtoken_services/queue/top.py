"""A live terminal view of a queue."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from xtoken_services.common.run.quantities import size

if TYPE_CHECKING:
    from xtoken_core.data_plane.queue_client import QueueClient

Stats = dict[str, Any]


def show(client: QueueClient, *, every: float, once: bool) -> None:
    """Show a queue until interrupted, or once.

    Args:
        client: Client with a session.
        every: Seconds between two updates.
        once: Show one view and return.
    """
    console = Console()
    before, seen = None, client.stats()
    if once:
        console.print(view(seen, before))
        return
    try:
        with Live(view(seen, before), console=console, refresh_per_second=10, screen=console.is_terminal) as live:
            while True:
                time.sleep(every)
                before, seen = seen, client.stats()
                live.update(view(seen, before))
    except KeyboardInterrupt:
        return


def view(seen: Stats, before: Stats | None) -> Group:
    """Return one view: totals, partitions and tasks, runs, sessions. Rates cover the time since `before`."""
    runs = [_runs(seen)] if any("run" in part for part in seen["partitions"].values()) else []
    return Group(_totals(seen, before), _tasks(seen, before), *runs, _sessions(seen))


def _totals(seen: Stats, before: Stats | None) -> Text:
    used = f"{size(seen['bytes'])} of {size(seen['memory_limit'])}"
    requests = sum(seen["requests"].values())
    rate = ""
    if before is not None:
        rate = f" · {(requests - sum(before['requests'].values())) / _span(seen, before):,.0f} requests/s"
    return Text(
        f"up {_age(seen['uptime_s'])} · {used} · {len(seen['sessions'])} sessions · {seen['waiting']} waiting{rate}"
    )


def _tasks(seen: Stats, before: Stats | None) -> Table:
    table = Table("partition", "task", "waiting", "ready", "leased", "done", "dead", "bytes", "rows/s", "oldest lease")
    for name, part in seen["partitions"].items():
        rate = ""
        if before is not None and name in before["partitions"]:
            rate = f"{(part['rows_put'] - before['partitions'][name]['rows_put']) / _span(seen, before):,.0f}"
        common = (str(part["dead"]), size(part["bytes"]), rate, _age(part["oldest_lease_s"]))
        title = f"{name} (sealed)" if part["sealed"] else name
        for task, states in part["tasks"].items():
            _add_row(table, title, task, *(str(states[s]) for s in ("waiting", "ready", "leased", "done")), *common)
            title, common = "", ("", "", "", "")
        if not part["tasks"]:
            _add_row(table, title, "-", "", str(part["samples"]), "", "", *common)
    return table


def _runs(seen: Stats) -> Table:
    table = Table("run", "step", "positions", "skipped", "rewinds", "blocks leased", "rings", "state")
    for name, part in seen["partitions"].items():
        if "run" not in part:
            continue
        run = part["run"]
        rings = ", ".join(
            f"{ring['teacher']}/{ring['rank']}: " + " ".join(f"{n} {state}" for state, n in ring["slots"].items() if n)
            for ring in run["rings"]
        )
        steps = -(-run["positions"] // run["samples_per_step"])
        state = f"failed: {run['failed']}" if run["failed"] else "ended" if run["ended"] else "running"
        _add_row(
            table,
            name,
            f"{run['step']} of {steps}",
            str(run["positions"]),
            str(run["skipped"]),
            str(run["rewinds"]),
            str(run["blocks_leased"]),
            rings,
            state,
        )
    return table


def _sessions(seen: Stats) -> Table:
    table = Table("session", "role", "rank", "phase", "progress", "last progress", "last seen")
    for session in seen["sessions"]:
        _add_row(
            table,
            session["name"],
            session["role"],
            str(session["rank"]),
            session["phase"],
            str(session["progress"]),
            _age(session["progress_age_s"]),
            _age(session["seen_age_s"]),
        )
    return table


def _add_row(table: Table, *cells: str) -> None:
    """Add a row of plain text: a worker chooses its name and reasons, which are no markup and control no terminal."""
    table.add_row(*(Text("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in cell)) for cell in cells))


def _span(seen: Stats, before: Stats) -> float:
    return max(float(seen["uptime_s"] - before["uptime_s"]), 1e-9)


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
