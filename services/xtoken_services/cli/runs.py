"""`xtoken runs`: commands of a control plane's client."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtoken_core.errors import ConfigError
from xtoken_services.cli.options import (
    DEFAULT_URL,
    TOKEN_VARIABLE,
    URL_VARIABLE,
    connect,
    control_plane_command,
    exit_as,
)
from xtoken_services.common.processes.progress import spinner

if TYPE_CHECKING:
    from xtoken_services.common.run.status import RunStatus
    from xtoken_services.control.client import ControlClient

PAGE_SIZE = 100
COLUMNS = ("id", "state", "progress", "began", "error")

runs_app = typer.Typer(
    help="Start, list, show, stop, resume and remove the runs of a control plane.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _complete_run(context: typer.Context, incomplete: str) -> list[str]:
    """Return run ids for shell completion; none if the control plane does not answer."""
    try:
        url = context.params.get("control") or os.environ.get(URL_VARIABLE, DEFAULT_URL)
        file = context.params.get("token_file") or os.environ.get(TOKEN_VARIABLE)
        with connect(url, Path(file) if file else None) as client:
            return [run["id"] for run in client.page(limit=PAGE_SIZE)["runs"] if run["id"].startswith(incomplete)]
    except Exception:  # a traceback would be printed into the command line that is being typed
        return []


RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's id, or its beginning.", autocompletion=_complete_run)
]
WatchOption = Annotated[
    bool,
    typer.Option("--watch", help="Show progress until the run ends, and exit as `xtoken run` does; Ctrl+C detaches."),
]


@runs_app.command()
@control_plane_command
def start(
    client: ControlClient,
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run's specification.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check it, its files included.")] = False,
    watch: WatchOption = False,
    as_json: bool = False,
) -> None:
    """Start a run on the control plane and return."""
    from xtoken_services.common.run.defaults import load_run

    spec, _ = load_run(run_file)
    if dry_run:
        with spinner(f"checking {spec.name}", quiet=as_json):
            plan = client.check(spec)
        line = f"{plan['spec']['name']}: {plan['positions']} samples in {plan['steps']} steps; nothing was started"
        _print(plan, "\n".join([*plan["warnings"], line]), as_json)
        return
    with spinner(f"checking {spec.name}", quiet=as_json):
        status = client.start(spec)
    _print_or_watch(client, status, status.id, watch=watch, as_json=as_json)


@runs_app.command()
@control_plane_command
def ls(
    client: ControlClient,
    state: Annotated[list[str] | None, typer.Option("--state", help="Only runs in this state; repeatable.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Largest number of runs.")] = 20,
    as_json: bool = False,
) -> None:
    """List runs, newest first."""
    runs = list(_pages(client, state or [], limit))
    if as_json:
        typer.echo(json.dumps(runs, indent=2))
        return
    if not runs:
        typer.echo("no runs", err=True)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2), show_edge=False, header_style="dim")
    for name in COLUMNS:
        table.add_column(name, overflow="fold")
    for run in runs:
        progress = f"{run['step'] or 0}/{run['steps'] or '?'}"
        table.add_row(run["id"], run["state"], progress, _local_time(run["began"]), run["error"])
    Console(soft_wrap=not sys.stdout.isatty()).print(table, markup=False)


@runs_app.command()
@control_plane_command
def show(client: ControlClient, run: RunArgument, watch: WatchOption = False, as_json: bool = False) -> None:
    """Show a run's status."""
    status = client.show(_resolve_id(client, run))
    if watch:
        _watch(client, status, as_json=as_json)
    elif as_json:
        typer.echo(json.dumps(status.document(), indent=2))
    else:
        from rich.console import Console

        from xtoken_services.supervisor.progress import render_status

        console = Console()
        began, ended = (_local_time(at) for at in (status.began, status.ended))
        times = f"began {began}" if began else ""
        times += f", ended {ended}" if ended else ""
        console.print(f"{status.id}  {times}".rstrip(), style="dim", markup=False, highlight=False)
        console.print(render_status(status, ""))
        if status.error:
            console.print(status.error, style="yellow", markup=False, highlight=False, soft_wrap=True)


@runs_app.command()
@control_plane_command
def logs(
    client: ControlClient,
    run: RunArgument,
    worker: Annotated[str, typer.Option("--worker", help="Only this worker's; all, merged by time, if left out.")] = "",
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=0, help="Number of the worker's start.", show_default="the last")
    ] = None,
    tail: Annotated[int, typer.Option("--tail", min=0, help="Number of last lines.")] = 200,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the run is over.")] = False,
    as_json: bool = False,
) -> None:
    """Print the last lines of a run's logs."""
    for line in client.logs(_resolve_id(client, run), worker=worker, attempt=attempt, lines=tail, follow=follow):
        typer.echo(json.dumps({"line": line}) if as_json else line)


@runs_app.command()
@control_plane_command
def stop(
    client: ControlClient,
    run: RunArgument,
    now: Annotated[bool, typer.Option("--now", help="Immediately, without a last checkpoint.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it is over.")] = False,
    as_json: bool = False,
) -> None:
    """Shut a run down gracefully: it writes a checkpoint first."""
    status = client.stop(_resolve_id(client, run), now=now)
    if wait:
        from xtoken_services.control.client import statuses

        with spinner(f"{status.id} is stopping", quiet=as_json):
            *_, status = statuses(client, status)
    _print(status.document(), f"{status.id}: {status.state}", as_json)


@runs_app.command()
@control_plane_command
def resume(client: ControlClient, run: RunArgument, watch: WatchOption = False, as_json: bool = False) -> None:
    """Resume a run that was stopped, failed or interrupted, from its last checkpoint."""
    status = client.resume(_resolve_id(client, run))
    _print_or_watch(client, status, f"{status.id}: {status.state}", watch=watch, as_json=as_json)


@runs_app.command()
@control_plane_command
def rm(
    client: ControlClient,
    run: RunArgument,
    files: Annotated[
        bool, typer.Option("--files", help="Remove its directory too, with checkpoints and model.")
    ] = False,
    as_json: bool = False,
) -> None:
    """Remove a finished run from the control plane."""
    run_id = _resolve_id(client, run)
    client.remove(run_id, files=files)
    _print({"id": run_id, "removed": True, "files": files}, f"{run_id}: removed", as_json)


@runs_app.command()
@control_plane_command
def get(
    client: ControlClient,
    run: RunArgument,
    path: Annotated[str, typer.Argument(help="A file or directory in the run's directory.")] = "model",
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Directory to write to.")] = Path(),
    as_json: bool = False,
) -> None:
    """Download a run's files: its model, a checkpoint, its metrics. Nothing is overwritten."""
    run_id = _resolve_id(client, run)
    listed = client.artifacts(run_id)["artifacts"]
    selected = [item for item in listed if item["path"] == path or item["path"].startswith(path.rstrip("/") + "/")]
    if not selected:
        raise ConfigError(f"the run {run_id} has no file {path}: see its progress with `xtoken runs show {run_id}`")
    if os.path.lexists(to / path):
        raise ConfigError(f"{to / path} exists already: choose another directory with --to, or remove it")
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, disable=as_json or not sys.stderr.isatty()) as progress:
        task = progress.add_task(path, total=sum(item["bytes"] for item in selected))
        for item in selected:
            target = to / item["path"]
            target.parent.mkdir(parents=True, exist_ok=True)
            client.download(run_id, item["path"], target, lambda size: progress.advance(task, size))
    from xtoken_services.supervisor.progress import plural

    line = f"{to / path}: {plural(len(selected), 'file')}"
    _print({"files": [str(to / item["path"]) for item in selected]}, line, as_json)


def _pages(client: ControlClient, states: list[str], limit: int) -> Iterator[dict[str, Any]]:
    cursor, left = None, limit
    while left > 0:
        page = client.page(limit=min(left, PAGE_SIZE), cursor=cursor, states=states)
        yield from page["runs"]
        cursor, left = page["next"], left - len(page["runs"])
        if cursor is None:
            return


def _local_time(at: str | None) -> str:
    """Return a time of the control plane, which is UTC, as this machine's; empty for None."""
    from datetime import datetime

    return datetime.fromisoformat(at).astimezone().strftime("%Y-%m-%d %H:%M:%S") if at else ""


def _resolve_id(client: ControlClient, run: str) -> str:
    """Return the run id with this beginning.

    Raises:
        ConfigError: Several runs have it.
    """
    ids = [str(item["id"]) for item in _pages(client, [], PAGE_SIZE) if item["id"].startswith(run)]
    if run in ids or not ids:
        return run
    if len(ids) > 1:
        raise ConfigError(f"several runs begin with {run}: {', '.join(ids[:5])}: type more of its id")
    return ids[0]


def _print_or_watch(client: ControlClient, status: RunStatus, line: str, *, watch: bool, as_json: bool) -> None:
    """Print a response; with `watch` show the run's progress after it, or instead of it as JSON."""
    if not (watch and as_json):
        _print(status.document(), line, as_json)
    if watch:
        _watch(client, status, as_json=as_json)


def _watch(client: ControlClient, status: RunStatus, *, as_json: bool) -> None:
    """Show a run's progress until it ends.

    Raises:
        typer.Exit: It has ended without being complete.
    """
    from xtoken_services.control.client import follow_until_interrupted, result_of
    from xtoken_services.supervisor.progress import open_view

    with open_view(show=True, as_json=as_json) as view:
        last = follow_until_interrupted(client, status, view)
        view.end(last)
    exit_as(result_of(last))


def _print(document: dict[str, Any], line: str, as_json: bool) -> None:
    typer.echo(json.dumps(document, indent=2) if as_json else line)
