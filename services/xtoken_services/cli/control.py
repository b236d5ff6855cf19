"""`xtoken control`: the control plane."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from xtoken_services.cli.options import set_up_logging


def control(
    host: Annotated[
        str, typer.Option(help="Address to listen at; any but a loopback address needs --token-file.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8400,
    runs_dir: Annotated[
        Path, typer.Option(help="Directory of the database and of all runs; nothing is written elsewhere.")
    ] = Path("runs"),
    root: Annotated[
        list[Path] | None,
        typer.Option("--root", metavar="DIR", help="Directory that runs may read; repeatable.", show_default="."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            help="The file (0600) with the token that requests must carry; created if it is missing.",
            show_default="~/.config/xtoken/control.token",
        ),
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option("--name", metavar="HOST", help="Host name that requests may use; repeatable.")
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxy",
            metavar="ADDRESS",
            help="Address of a proxy that names its clients in X-Forwarded-For; repeatable.",
            show_default="none",
        ),
    ] = None,
    on_exit: Annotated[
        Literal["leave", "stop"], typer.Option("--on-exit", help="What happens to its runs when it exits.")
    ] = "leave",
) -> None:
    """Serve the control plane.

    Starts, lists, shows, stops and resumes runs over HTTP. Runs continue when it exits, and a control plane started for
    the same directory takes them over. While none is running, no failed worker is restarted.
    """
    set_up_logging()
    from xtoken_services.control.serve import serve

    serve(
        host,
        port,
        runs_dir,
        roots=root or [Path()],
        token_file=token_file,
        names=name or (),
        proxies=trusted_proxy or (),
        stop_on_exit=on_exit == "stop",
    )
