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
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline", help="Then train the same student by cross-entropy only, in OUTPUT-baseline, and compare."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Distil, and show the run's progress until it ends.

    Ctrl+C shuts down gracefully, a second Ctrl+C forces the run to quit. Rerun the same command to resume from the last
    checkpoint. Without --control no process outlives this command.
    """
    from services.common.custom_loss import check_custom_loss
    from xtoken_core.config import RunSpec, load_run_spec
    from xtoken_core.errors import ConfigError

    spec = load_run_spec(run_file)
    if control and loss is not None:
        raise ConfigError("--loss names code of this machine, which no control plane runs: leave out --control")
    if baseline and not spec.teacher:
        raise ConfigError("--baseline: this run has no teacher, so it is its own baseline: leave out --baseline")
    if not control:
        check_custom_loss(spec.loss, loss)

    def run_to_end(one: RunSpec, loss: str | None) -> None:
        if control:
            from services.control.client import run_at

            result = run_at(control, one, token=read_control_token(token_file), as_json=as_json)
        else:
            from services.supervisor.local_run import run_locally

            result = run_locally(one, as_json=as_json, loss=loss)
        if result.error:
            typer.echo(f"error: {result.error}", err=True)
        if result.exit_code:
            raise typer.Exit(result.exit_code)

    run_to_end(spec, loss)
    if baseline:
        from services.common.baseline import baseline_of
        from services.supervisor.comparison import comparison_line

        run_to_end(baseline_of(spec), None)
        line = comparison_line(spec.output)
        if line and not as_json:
            typer.echo(line)
    raise typer.Exit(0)
