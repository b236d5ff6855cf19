"""`xtoken run`: one run, from its specification to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import ControlTokenOption, JsonOption, read_control_token


def run(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run's specification.")],
    control: Annotated[
        str | None,
        typer.Option("--control", metavar="URL", help="A control plane to run it on.", show_default="this process"),
    ] = None,
    token_file: ControlTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Distil, and show the run's progress until it ends.

    Ctrl+C shuts down gracefully, a second Ctrl+C forces the run to quit. Rerun the same command to resume from the last
    checkpoint. Without --control no process outlives this command.
    """
    from xtoken_core.config import load_run_spec

    spec = load_run_spec(run_file)
    if control:
        from services.control.client import run_at

        result = run_at(control, spec, token=read_control_token(token_file), as_json=as_json)
    else:
        from services.supervisor.local_run import run_locally

        result = run_locally(spec, as_json=as_json)
    if result.error:
        typer.echo(f"error: {result.error}", err=True)
    raise typer.Exit(result.exit_code)
