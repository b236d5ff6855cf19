"""`xtoken run`: one run, from its specification to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import ControlTokenOption, JsonOption, token_in


def run(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run's specification.")],
    control: Annotated[
        str | None,
        typer.Option("--control", metavar="URL", help="A control plane to run it on.", show_default="one of its own"),
    ] = None,
    token_file: ControlTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Distil, and watch it.

    Shows the run's progress until it ends. Ctrl-C stops it in order, a second one at once; the same command goes on
    from the last checkpoint. Without --control everything ends with this command, however it ends.
    """
    from xtoken_core.config import load_run_spec

    spec = load_run_spec(run_file)
    if control:
        from services.control.client import run_at

        outcome = run_at(control, spec, token=token_in(token_file), as_json=as_json)
    else:
        from services.supervisor.local_run import run_locally

        outcome = run_locally(spec, as_json=as_json)
    if outcome.error:
        typer.echo(f"error: {outcome.error}", err=True)
    raise typer.Exit(outcome.exit_code)
