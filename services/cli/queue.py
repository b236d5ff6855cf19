"""`xtoken queue`: serve one; look into one that serves (`stats`, `peek`, `top`); make keys for one on a network.

Mounted by `app.add_typer(queue_app, name="queue")`. Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import set_up_logging

if TYPE_CHECKING:
    from xtoken_core.data_plane.queue_client import QueueClient

PATIENCE_S = 5.0

queue_app = typer.Typer(
    help="Serve a transfer queue, or look into one.", invoke_without_command=True, pretty_exceptions_enable=False
)

AtOption = Annotated[
    str, typer.Option("--queue", metavar="ADDR", help="The queue's address: ipc://PATH or tcp://HOST:PORT.")
]
TokenOption = Annotated[
    Path | None,
    typer.Option("--token-file", help="The file with the queue's token, for loopback tcp.", show_default=False),
]
KeysOption = Annotated[
    Path | None,
    typer.Option("--keys", metavar="DIR", help="The directory of keys, for any other tcp.", show_default=False),
]


@queue_app.callback()
def serve_queue(
    context: typer.Context,
    bind: Annotated[
        str | None,
        typer.Option(
            "--bind", metavar="ADDR", help="Where to serve: ipc://PATH or tcp://HOST:PORT.", show_default=False
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN.toml|resolved.json", help="A run to open.", show_default=False),
    ] = None,
    group: Annotated[int, typer.Option("--group", min=0, help="Which of the run's node groups it serves.")] = 0,
    token_file: TokenOption = None,
    keys: KeysOption = None,
    memory_limit: Annotated[
        int | None,
        typer.Option("--memory-limit", min=1, metavar="BYTES", help="Bytes held at most.", show_default="the run's"),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option("--journal", metavar="DIR", help="Keep what is stored there through a crash.", show_default=False),
    ] = None,
    fsync: Annotated[
        str, typer.Option("--fsync", help="When the journal is flushed to disk: interval or always.")
    ] = "interval",
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port", min=0, max=65535, help="Serve /metrics on this loopback port.", show_default=False
        ),
    ] = None,
) -> None:
    """Serve a transfer queue, unless a command says otherwise."""
    if context.invoked_subcommand is not None:
        return
    if bind is None:
        raise typer.BadParameter("say where to serve", param_hint="--bind")
    from services.queue.main import serve

    set_up_logging()
    serve(
        bind, run=run, token_file=token_file, memory_limit=memory_limit, keys=keys, journal=journal, fsync=fsync,
        metrics_port=metrics_port, group=group,
    )  # fmt: skip


@queue_app.command()
def stats(queue: AtOption, token_file: TokenOption = None, keys: KeysOption = None) -> None:
    """Print everything a queue counts, as JSON."""
    import json

    with _connected(queue, token_file, keys) as client:
        typer.echo(json.dumps(client.stats(), indent=2))


@queue_app.command()
def peek(
    partition: Annotated[str, typer.Argument(help="The partition.")],
    sample: Annotated[int, typer.Argument(min=0, help="The sample's id.")],
    queue: AtOption,
    token_file: TokenOption = None,
    keys: KeysOption = None,
) -> None:
    """Print what a queue knows of one sample."""
    import json

    with _connected(queue, token_file, keys) as client:
        seen = client.peek(partition, sample)
    shown = {"fields": seen.fields, "status": seen.status, "attempts": seen.attempts, "reason": seen.reason}
    typer.echo(json.dumps(shown, indent=2, ensure_ascii=False))


@queue_app.command()
def top(
    queue: AtOption,
    token_file: TokenOption = None,
    keys: KeysOption = None,
    every: Annotated[float, typer.Option("--every", min=0.1, metavar="SECONDS", help="How often to look.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view and end.")] = False,
) -> None:
    """Watch a queue: partitions, tasks, rings and sessions. Ctrl-C ends it."""
    from services.queue.top import show

    with _connected(queue, token_file, keys) as client:
        show(client, every=every, once=once)


@queue_app.command()
def keygen(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the keys go.")],
    client: Annotated[bool, typer.Option("--client", help="Make a client's keys, not the queue's.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make the keys of a queue on a network, or of one of its clients."""
    from xtoken_core.data_plane.keys import create_client_keys, create_queue_keys

    public = create_client_keys(directory) if client else create_queue_keys(directory)
    where = "the queue's clients/, under any name.key" if client else "every client's directory, as queue.key"
    if as_json:
        import json

        typer.echo(json.dumps({"public_key": str(public), "copy_to": where}))
        return
    typer.echo(f"{public}: copy this public key into {where}")


@contextmanager
def _connected(queue: str, token_file: Path | None, keys: Path | None) -> Iterator[QueueClient]:
    import time

    from xtoken_core.data_plane.address import Address
    from xtoken_core.data_plane.queue_client import QueueClient
    from xtoken_core.data_plane.zmq_transport import ZmqTransport

    with QueueClient(ZmqTransport(Address.parse(queue, token_file, keys), patience_s=PATIENCE_S)) as client:
        client.hello(f"viewer-{os.getpid()}", "viewer", incarnation=time.time_ns())
        yield client
