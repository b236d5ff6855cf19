"""`xtoken gradients`: which classes of chunks a run's loss teaches, and whether they pull the same way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from xtoken_services.cli.options import JsonOption, LossOption


def gradients(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run's specification, with [eval].")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where gradients.json and gradients.svg go.")],
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="DIR", help="A trained student to measure.", show_default="student.model"),
    ] = None,
    documents: Annotated[
        int | None,
        typer.Option("--documents", min=1, help="Held-out documents.", show_default="eval.kl_documents"),
    ] = None,
    loss: LossOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure gradients by class of chunk on held-out text: norms, and cosines between them. Nothing is trained."""
    from xtoken_core.atomic import atomic_write
    from xtoken_services.common.files.input_files import check_input_files
    from xtoken_services.common.run.custom_loss import check_custom_loss
    from xtoken_services.common.run.defaults import load_run

    spec, _ = load_run(run_file)
    if model is not None:
        tokenizer = spec.student.tokenizer or spec.student.model
        spec = spec.model_copy(
            update={"student": spec.student.model_copy(update={"model": model.absolute(), "tokenizer": tokenizer})}
        )
    if documents is not None and spec.eval is not None:
        spec = spec.model_copy(update={"eval": spec.eval.model_copy(update={"kl_documents": documents})})
    check_custom_loss(spec.loss, loss)
    check_input_files(spec)
    from xtoken_services.trainer.chunk_gradients import measure_gradients
    from xtoken_services.trainer.gradient_picture import gradient_picture

    measured = measure_gradients(spec, custom_loss=loss)
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(out / "gradients.json", json.dumps(measured, indent=1) + "\n")
    atomic_write(out / "gradients.svg", gradient_picture(measured))
    if as_json:
        typer.echo(json.dumps(measured, indent=1))
        return
    for name, entry in measured["classes"].items():
        ratio = "-" if entry["norm_ratio"] is None else f"{entry['norm_ratio']:.3f}"
        unit = "tokens" if name == "cross_entropy" else "chunks"
        typer.echo(f"{name}: {entry['count']} {unit}, {entry['value']:.4f} nats, norm {ratio}")
    typer.echo(str(out / "gradients.svg"))
