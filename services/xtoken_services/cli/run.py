"""`xtoken run`: one run, from its specification to its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtoken_services.cli.options import (
    ControlTokenOption,
    JsonOption,
    LossOption,
    SetOption,
    exit_as,
    read_control_token,
)

if TYPE_CHECKING:
    from xtoken_core.config import RunSpec


def run(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run's specification.")],
    control: Annotated[
        str | None,
        typer.Option("--control", metavar="URL", help="A control plane to run it on.", show_default="this process"),
    ] = None,
    token_file: ControlTokenOption = None,
    loss: LossOption = None,
    settings: SetOption = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check everything, print the resolved run file with its defaults, and start nothing."
        ),
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="With --dry-run: take three steps: the time, and whether the teacher is better."
        ),
    ] = False,
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
    from xtoken_core.errors import ConfigError
    from xtoken_services.common.run.baseline import why_no_baseline
    from xtoken_services.common.run.defaults import load_run

    spec, notes = load_run(run_file, settings or ())
    second = _baseline_of(spec) if baseline else None
    if measure and (control or not dry_run):
        raise ConfigError("--measure goes with --dry-run, on this machine: it starts a trial, not the run")
    if dry_run:
        _print_dry_run(spec, notes, None if control else loss, measure=measure, as_json=as_json)
        return
    if control and loss is not None:
        raise ConfigError("--loss names code of this machine, which no control plane runs: leave out --control")
    for note in notes if not as_json else ():
        typer.echo(f"default: {note}")
    distilled = _run_to_end(spec, loss, control, token_file, as_json)
    if second is not None:
        compared = _run_to_end(second, None, control, token_file, as_json)
        _print_comparison(distilled, compared, as_json=as_json)
    elif distilled and not why_no_baseline(spec.model_dump()) and not as_json:
        typer.echo("what the teacher has brought: the same command with --baseline")
    raise typer.Exit(0)


def _baseline_of(spec: RunSpec) -> RunSpec:
    """Return a run's baseline.

    Raises:
        ConfigError: It has none, or nothing on which the two could be compared.
    """
    from xtoken_core.errors import ConfigError
    from xtoken_services.common.run.baseline import baseline_of

    if (made := baseline_of(spec)).eval is None:
        raise ConfigError("--baseline compares both students on held-out text, and this run has none: name eval.path")
    return made


def _print_dry_run(spec: RunSpec, notes: list[str], loss: str | None, *, measure: bool, as_json: bool) -> None:
    """Check a run; print the resolved run file, then its sizes and warnings."""
    from xtoken_services.cli.dry_run import check_run
    from xtoken_services.common.run.run_text import resolved_text

    steps = "taking a few steps with the real models: on a CPU that may take minutes"
    typer.echo(steps if measure else "checking files, tokenizers and text: a new pair takes up to a minute", err=True)
    lines = check_run(spec, loss, measure=measure)
    typer.echo(resolved_text(spec, notes, as_json=as_json))  # its sizes and warnings below it, where they are seen
    for line in lines:
        typer.echo(line, err=True)


def _print_comparison(distilled: dict[str, Any], baseline: dict[str, Any], *, as_json: bool) -> None:
    """Print how a run compares with its baseline, if both have an evaluation."""
    from xtoken_services.supervisor.comparison import compare

    comparison = compare(distilled, baseline)
    if as_json:
        typer.echo(json.dumps({"comparison": None if comparison is None else comparison.document()}))
    elif comparison is not None:
        typer.echo(comparison.line())


def _run_to_end(
    spec: RunSpec, loss: str | None, control: str | None, token_file: Path | None, as_json: bool
) -> dict[str, Any]:
    """Run one specification to its end, on a control plane or from this process.

    Returns:
        The evaluation of the exported weights; empty without one.

    Raises:
        typer.Exit: It did not complete.
    """
    if control:
        from xtoken_services.control.client import run_at

        # Its files may be on another machine.
        result, status = run_at(control, spec, token=read_control_token(token_file, control), as_json=as_json)
        exit_as(result)
        return status.exported
    from xtoken_services.common.run.run_warnings import is_size
    from xtoken_services.supervisor.comparison import exported_in
    from xtoken_services.supervisor.events import SupervisorEvents
    from xtoken_services.supervisor.local_run import run_locally

    class Sizes(SupervisorEvents):
        def message(self, text: str, *, worker: str = "") -> None:
            if is_size(text) and not as_json:
                typer.echo(text)

    result = run_locally(spec, as_json=as_json, loss=loss, events=Sizes())
    exit_as(result)
    return exported_in(spec.output)
