"""`xtoken runs`: a control plane's client on the command line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.options import (
    DEFAULT_URL,
    TOKEN_VARIABLE,
    URL_VARIABLE,
    ControlOption,
    ControlTokenOption,
    JsonOption,
    token_in,
)
from services.common.progress import spinner
from xtoken_core.errors import ConfigError

if TYPE_CHECKING:
    from services.control.client import ControlClient

OFFERED = 100
COLUMNS = ("id", "state", "progress", "began", "error")

runs_app = typer.Typer(
    help="Start, list, show, stop, resume and remove the runs of a control plane.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _offer_runs(context: typer.Context, incomplete: str) -> list[str]:
    """The ids of runs, for the shell to complete; none if nobody answers."""
    try:
        url = context.params.get("control") or os.environ.get(URL_VARIABLE, DEFAULT_URL)
        file = context.params.get("token_file") or os.environ.get(TOKEN_VARIABLE)
        with _client(url, Path(file) if file else None) as client:
            return [run["id"] for run in client.page(limit=OFFERED)["runs"] if run["id"].startswith(incomplete)]
    except Exception:  # whatever it is, a shell has no use for it
        return []


RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's id, or its beginning.", autocompletion=_offer_runs)
]


@runs_app.command()
def start(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run's specification.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check it, its files included.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show its progress until it ends; Ctrl-C leaves it.")] = False,
    control: ControlOption = DEFAULT_URL,
    token_file: ControlTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start a run, and leave it to the control plane."""
    from xtoken_core.config import load_run_spec

    spec = load_run_spec(run_file)
    with _client(control, token_file) as client:
        if dry_run:
            with spinner(f"checking {spec.name}", quiet=as_json):
                found = client.check(spec)
            line = (
                f"{found['spec']['name']}: {found['positions']} samples in {found['steps']} steps; nothing was started"
            )
            _print(found, line, as_json)
            return
        with spinner(f"checking {spec.name}", quiet=as_json):
            status = client.start(spec)
        _tell_or_watch(client, status, status["id"], watch=watch, as_json=as_json)


@runs_app.command()
def ls(
    state: Annotated[list[str] | None, typer.Option("--state", help="Only these; may be given again.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many at most.")] = 20,
    control: ControlOption = DEFAULT_URL,
    token_file: ControlTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """List runs, the newest first."""
    with _client(control, token_file) as client:
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
        table.add_row(run["id"], run["state"], progress, (run["began"] or "")[:19], run["error"])
    Console(soft_wrap=not sys.stdout.isatty()).print(table, markup=False)


@runs_app.command()
def show(
    run: RunArgument,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until it ends; Ctrl-C leaves it.")] = False,
    control: ControlOption = DEFAULT_URL,
    token_file: ControlTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show where a run stands."""
    with _client(control, token_file) as client:
        status = client.show(_find(client, run))
        if watch:
            _watch(client, status, as_json=as_json)
        elif as_json:
            typer.echo(json.dumps(status, indent=2))
        else:
            from rich.console import Console

            from services.supervisor.progress import render_status

            console = Console()
            console.print(render_status(status, ""))
            if status["error"]:
                console.print(status["error"], style="yellow", markup=False, highlight=False, soft_wrap=True)


@runs_app.command()
def logs(
    run: RunArgument,
    worker: Annotated[str, typer.Option("--worker", help="One worker's; all, merged by time, if left out.")] = "",
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=0, help="Which start of it.", show_default="the last")
    ] = None,
    tail: Annotated[int, typer.Option("--tail", min=0, help="How many last lines.")] = 200,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is over.")] = False,
    control: ControlOption = DEFAULT_URL,
    token_file: ControlTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the last lines of a run's logs."""
    with _client(control, token_file) as client:
        for line in client.logs(_find(client, run), worker=worker, attempt=attempt, lines=tail, follow=follow):
            typer.echo(json.dumps({"line": line}) if as_json else line)


@runs_app.command()
def stop(
    run: RunArgument,
    now: Annotated[bool, typer.Option("--now", help="At once, without a last checkpoint.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Until it is over.")] = False,
    control: ControlOption = DEFAULT_URL,
    token_file: ControlTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a run in order: it writes a checkpoint first."""
    with _client(control, token_file) as client:
        status = client.stop(_find(client, run), now=now)
        if wait:
            with spinner(f"{status['id']} is stopping", quiet=as_json):
                status = _await_end(client, status)
        _print(status, f"{status['id']}: {status['state']}", as_json)


@runs_app.command()
def resume(
    run: RunArgument,
    watch: Annotated[bool, typer.Option("--watch", help="Show its progress until it ends; Ctrl-C leaves it.")] = False,
    control: ControlOption = DEFAULT_URL,
    token_file: ControlTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go on with a run that was stopped, failed or interrupted, from its last checkpoint."""
    with _client(control, token_file) as client:
        status = client.resume(_find(client, run))
        _tell_or_watch(client, status, f"{status['id']}: {status['state']}", watch=watch, as_json=as_json)


@runs_app.command()
def rm(
    run: RunArgument,
    files: Annotated[bool, typer.Option("--files", help="Remove its directory too: checkpoints, model, all.")] = False,
    control: ControlOption = DEFAULT_URL,
    token_file: ControlTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget a run that is over."""
    with _client(control, token_file) as client:
        run_id = _find(client, run)
        client.remove(run_id, files=files)
        _print({"id": run_id, "removed": True, "files": files}, f"{run_id}: removed", as_json)


@runs_app.command()
def get(
    run: RunArgument,
    path: Annotated[str, typer.Argument(help="A file or directory below the run's own.")] = "model",
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Where it goes.")] = Path(),
    control: ControlOption = DEFAULT_URL,
    token_file: ControlTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch what a run has written: its model, a checkpoint, its curves. It writes over nothing."""
    with _client(control, token_file) as client:
        run_id = _find(client, run)
        listed = client.artifacts(run_id)["artifacts"]
        wanted = [item for item in listed if item["path"] == path or item["path"].startswith(path.rstrip("/") + "/")]
        if not wanted:
            raise ConfigError(f"the run {run_id} has no file {path}: `xtoken runs show {run_id}` tells how far it is")
        if os.path.lexists(to / path):
            raise ConfigError(f"{to / path} is there already: name another directory with --to, or remove it")
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, disable=as_json or not sys.stderr.isatty()) as progress:
            task = progress.add_task(path, total=sum(item["bytes"] for item in wanted))
            for item in wanted:
                target = to / item["path"]
                target.parent.mkdir(parents=True, exist_ok=True)
                client.download(run_id, item["path"], target, lambda size: progress.advance(task, size))
    from services.supervisor.progress import plural

    line = f"{to / path}: {plural(len(wanted), 'file')}"
    _print({"files": [str(to / item["path"]) for item in wanted]}, line, as_json)


@contextmanager
def _client(url: str, token_file: Path | None) -> Iterator[ControlClient]:
    token = token_in(token_file)
    from services.control.client import ControlClient

    client = ControlClient(url, token)
    try:
        yield client
    finally:
        client.close()


def _pages(client: ControlClient, states: list[str], limit: int) -> Iterator[dict[str, Any]]:
    cursor, left = None, limit
    while left > 0:
        page = client.page(limit=min(left, OFFERED), cursor=cursor, states=states)
        yield from page["runs"]
        cursor, left = page["next"], left - len(page["runs"])
        if cursor is None:
            return


def _find(client: ControlClient, run: str) -> str:
    """The id that begins like this.

    Raises:
        ConfigError: Several do.
    """
    found = [item["id"] for item in _pages(client, [], OFFERED) if item["id"].startswith(run)]
    if run in found or not found:
        return run
    if len(found) > 1:
        raise ConfigError(f"several runs begin with {run}: {', '.join(found[:5])}: say more of its id")
    return str(found[0])


def _tell_or_watch(client: ControlClient, status: dict[str, Any], line: str, *, watch: bool, as_json: bool) -> None:
    """Say what was answered; with `watch` the run's statuses follow, or are all there is where JSON is asked for."""
    if not (watch and as_json):
        _print(status, line, as_json)
    if watch:
        _watch(client, status, as_json=as_json)


def _watch(client: ControlClient, status: dict[str, Any], *, as_json: bool) -> None:
    from services.control.client import follow_until_interrupted
    from services.supervisor.progress import open_view

    with open_view(show=True, as_json=as_json) as view:
        view.end(follow_until_interrupted(client, status, view))


def _await_end(client: ControlClient, status: dict[str, Any]) -> dict[str, Any]:
    from services.control.client import await_end

    return await_end(client, status)


def _print(document: dict[str, Any], line: str, as_json: bool) -> None:
    typer.echo(json.dumps(document, indent=2) if as_json else line)
