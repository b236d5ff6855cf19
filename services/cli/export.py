"""`xtoken export`: a model directory from a checkpoint of a run that goes on, was stopped or has failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def export(
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The run's directory.")],
    step: Annotated[
        int | None,
        typer.Option("--step", min=1, metavar="N", help="The checkpoint's step.", show_default="the newest"),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="DIR",
            help="Where the model goes; there must be nothing yet.",
            show_default="OUTPUT/model-step-NNNNNNNN",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a model from a run's checkpoint.

    The run may have been stopped, have failed or still go on. It takes no GPU. What a completed run leaves in
    OUTPUT/model, this makes of a checkpoint: weights, tokenizer, and a card with the figures up to its step.
    """
    from services.common.progress import spinner
    from services.trainer.export_checkpoint import choose

    choose(output, step, to)
    with spinner("reading the checkpoint and writing the model", quiet=as_json):
        from services.trainer.export_checkpoint import export_checkpoint

        found = export_checkpoint(output, step, to)
    told = {"directory": str(found.target), "step": found.step}
    typer.echo(json.dumps(told) if as_json else f"{found.target}: after {found.step} of {found.run.steps} steps")
