"""`xtoken run`: one run, from its specification to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import ControlTokenOption, JsonOption, LossOption, read_control_token


def run(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run's specification.")],
    control: Annotated[
        str | None,
        typer.Option("--control", metavar="URL", help="A control plane to run it on.", show_default="this process"),
    ] = None,
    token_file: ControlTokenOption = None,
    loss: LossOption = None,
    as_json: JsonOption = False,
) -> None:
    """Distil, and show the run's progress until it ends.

    Ctrl+C shuts down gracefully, a second Ctrl+C forces the run to quit. Rerun the same command to resume from the last
    checkpoint. Without --control no process outlives this command.
    """
    from services.common.custom_loss import check_custom_loss
    from xtoken_core.config import load_run_spec
    from xtoken_core.errors import ConfigError

    spec = load_run_spec(run_file)
    if control and loss is not None:
        raise ConfigError("--loss names code of this machine, which no control plane runs: leave out --control")
    if control:
        from services.control.client import run_at

        result = run_at(control, spec, token=read_control_token(token_file), as_json=as_json)
    else:
        check_custom_loss(spec.loss, loss)
        from services.supervisor.local_run import run_locally

        result = run_locally(spec, as_json=as_json, loss=loss)
    if result.error:
        typer.echo(f"error: {result.error}", err=True)
    raise typer.Exit(result.exit_code)
