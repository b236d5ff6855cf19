"""`xtoken export`: a model directory from a checkpoint, also of a run that is still running or has failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from xtoken_services.cli.options import JsonOption


def export(
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The run's directory.")],
    step: Annotated[
        int | None,
        typer.Option("--step", min=1, metavar="N", help="Step of the checkpoint.", show_default="the newest"),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The checkpoint of the best evaluation (eval.keep_best).")
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="DIR",
            help="Directory to write the model to; it must not exist.",
            show_default="OUTPUT/model-step-NNNNNNNN",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Export a model from a run's checkpoint.

    The run may be running, stopped or failed, and no GPU is needed. The model directory has the files that a completed
    run writes to OUTPUT/model: weights, tokenizer, and a model card with the metrics up to the checkpoint's step.
    """
    from xtoken_services.common.processes.progress import spinner
    from xtoken_services.trainer.export_checkpoint import choose, step_of_best

    step = step_of_best(output, step) if best else step
    choose(output, step, to)
    with spinner("reading the checkpoint and writing the model", quiet=as_json):
        from xtoken_services.trainer.export_checkpoint import export_checkpoint

        exported = export_checkpoint(output, step, to)
    document = {"directory": str(exported.target), "step": exported.step}
    line = f"{exported.target}: after {exported.step} of {exported.run.steps} steps"
    typer.echo(json.dumps(document) if as_json else line)
