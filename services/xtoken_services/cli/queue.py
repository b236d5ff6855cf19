"""`xtoken queue`: serve a queue, inspect one (`stats`, `peek`, `top`), or create its keys."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xtoken_services.cli.options import JsonOption, KeysOption, QueueOption, QueueTokenOption, set_up_logging

if TYPE_CHECKING:
    from xtoken_core.config.resolved import ResolvedRun
    from xtoken_core.data_plane.queue_client import QueueClient

PATIENCE_S = 5.0
SILENCE_S = 30.0
MOST_EVERY_S = 3600.0
"""Time between two updates of a view at most; its session may be silent for three times as long."""

INTERVAL = "interval"
queue_app = typer.Typer(
    help="Serve a queue, or inspect one.", invoke_without_command=True, pretty_exceptions_enable=False
)


@queue_app.callback()
def serve_queue(
    context: typer.Context,
    bind: Annotated[
        str | None, typer.Option("--bind", metavar="ADDR", help="Address to serve at: ipc://PATH or tcp://HOST:PORT.")
    ] = None,
    run: Annotated[Path | None, typer.Option("--run", metavar="RUN.toml|resolved.json", help="Run to open.")] = None,
    group: Annotated[int, typer.Option("--group", min=0, help="Number of the run's node group that it serves.")] = 0,
    token_file: QueueTokenOption = None,
    keys: KeysOption = None,
    memory_limit: Annotated[
        int | None,
        typer.Option(
            "--memory-limit", min=1, metavar="BYTES", help="Largest number of bytes to hold.", show_default="the run's"
        ),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option("--journal", metavar="DIR", help="Write-ahead log that lets stored samples survive a crash."),
    ] = None,
    fsync: Annotated[
        str, typer.Option("--fsync", help="When the journal is synced to disk: interval or always.")
    ] = INTERVAL,
    metrics_port: Annotated[
        int | None, typer.Option("--metrics-port", min=0, max=65535, help="Serve /metrics on this loopback port.")
    ] = None,
) -> None:
    """Serve a queue, unless a command is given."""
    if context.invoked_subcommand is not None:
        return
    if bind is None:
        raise typer.BadParameter("an address to serve at is required", param_hint="--bind")
    set_up_logging()
    resolved = None if run is None else _load_resolved(run)
    if resolved is not None and (journal, metrics_port, fsync) == (None, None, INTERVAL):
        from xtoken_services.queue.main import serve_run

        serve_run(bind, resolved, token_file=token_file, memory_limit=memory_limit, keys=keys, group=group)
        return
    from xtoken_services.queue.standalone import serve_alone

    serve_alone(
        bind,
        run=resolved,
        token_file=token_file,
        memory_limit=memory_limit,
        keys=keys,
        journal=journal,
        fsync=fsync,
        metrics_port=metrics_port,
        group=group,
    )


def _load_resolved(path: Path) -> ResolvedRun:
    """Load a run from a run file (`.toml`, filled in and resolved here) or from an already resolved one (`.json`)."""
    # These imports take longer than those of a queue without a run: data readers and tokenizers.
    from xtoken_core.config.resolved import parse_resolved_run
    from xtoken_core.errors import InputError, os_errors_as

    if path.suffix == ".toml":
        from xtoken_services.common.run.defaults import load_run
        from xtoken_services.common.run.resolve import resolve_run

        spec, notes = load_run(path)
        for note in notes:
            typer.echo(f"default: {note}", err=True)
        return resolve_run(spec)
    with os_errors_as(InputError, f"cannot read the run file {path}"):
        return parse_resolved_run(path.read_bytes(), source=str(path))


@queue_app.command()
def stats(queue: QueueOption, token_file: QueueTokenOption = None, keys: KeysOption = None) -> None:
    """Print a queue's statistics as JSON."""
    with _connected(queue, token_file, keys) as client:
        typer.echo(json.dumps(client.stats(), indent=2))


@queue_app.command()
def peek(
    partition: Annotated[str, typer.Argument(help="The partition.")],
    sample: Annotated[int, typer.Argument(min=0, help="The sample's id.")],
    queue: QueueOption,
    token_file: QueueTokenOption = None,
    keys: KeysOption = None,
) -> None:
    """Print the state of one sample as JSON."""
    with _connected(queue, token_file, keys) as client:
        state = client.peek(partition, sample)
    document = {name: getattr(state, name) for name in ("fields", "status", "attempts", "reason")}
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))


@queue_app.command()
def top(
    queue: QueueOption,
    token_file: QueueTokenOption = None,
    keys: KeysOption = None,
    every: Annotated[
        float, typer.Option("--every", min=0.1, max=MOST_EVERY_S, metavar="SECONDS", help="Time between updates.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view and exit.")] = False,
) -> None:
    """Watch a queue's partitions, tasks, rings and sessions, until Ctrl+C."""
    from xtoken_services.queue.top import show

    with _connected(queue, token_file, keys, silence_s=max(SILENCE_S, 3 * every)) as client:
        show(client, every=every, once=once)


@queue_app.command()
def keygen(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write to.")],
    client: Annotated[bool, typer.Option("--client", help="Create a client's keys, not the queue's.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Create the keys of a queue on a network, or of one of its clients."""
    from xtoken_core.data_plane.keys import create_client_keys, create_queue_keys

    public = create_client_keys(directory) if client else create_queue_keys(directory)
    where = "the queue's clients/, under any name.key" if client else "every client's directory, as queue.key"
    text = f"{public}: copy this public key into {where}"
    typer.echo(json.dumps({"public_key": str(public), "copy_to": where}) if as_json else text)


@contextmanager
def _connected(
    queue: str, token_file: Path | None, keys: Path | None, *, silence_s: float = SILENCE_S
) -> Iterator[QueueClient]:
    import time

    from xtoken_core.data_plane.address import Address
    from xtoken_core.data_plane.queue_client import QueueClient
    from xtoken_core.data_plane.zmq_transport import ZmqTransport

    with QueueClient(ZmqTransport(Address.parse(queue, token_file, keys), patience_s=PATIENCE_S)) as client:
        client.hello(f"viewer-{os.getpid()}", "viewer", incarnation=time.time_ns(), silence_s=silence_s)
        yield client
