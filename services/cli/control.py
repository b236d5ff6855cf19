"""`xtoken control`: the control plane."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import set_up_logging


class OnExit(StrEnum):
    """What becomes of a control plane's runs when it is told to leave."""

    LEAVE = "leave"
    STOP = "stop"


def control(
    host: Annotated[
        str, typer.Option(help="Where to listen; other than at a loopback address only with --token-file.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 8400,
    runs_dir: Annotated[Path, typer.Option(help="Where runs are remembered and written; nowhere else.")] = Path("runs"),
    root: Annotated[
        list[Path] | None,
        typer.Option("--root", metavar="DIR", help="Where runs may read; may be given again.", show_default="."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            help="The file (0600) with the token that requests must carry; made if it is missing.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="HOST", help="A host name it may be asked for under; may be given again."),
    ] = None,
    on_exit: Annotated[
        OnExit, typer.Option("--on-exit", help="What becomes of its runs when it is told to leave.")
    ] = OnExit.LEAVE,
) -> None:
    """Serve the control plane.

    Starts, lists, shows, stops and resumes runs over HTTP. Its runs outlive it: a control plane started for the same
    directory finds them again. While none lives, nothing is restarted.
    """
    set_up_logging()
    from services.control.serve import serve

    serve(
        host, port, runs_dir, roots=root or [Path()], token_file=token_file, names=name or (),
        stop_on_exit=on_exit == OnExit.STOP,
    )  # fmt: skip
