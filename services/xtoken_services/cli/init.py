"""`xtoken init`: a run file from the models and text that a directory has."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from xtoken_services.cli.options import JsonOption


def init(
    student: Annotated[
        Path | None, typer.Option("--student", help="The student's directory.", show_default=False)
    ] = None,
    teacher: Annotated[
        Path | None, typer.Option("--teacher", help="The teacher's directory.", show_default=False)
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="The text to train on.", show_default=False)] = None,
    out: Annotated[Path, typer.Option("--out", help="The run file; it must not exist.")] = Path("run.toml"),
    as_json: JsonOption = False,
) -> None:
    """Write a commented run file from the models and the text below this directory.

    Of the models, the one with the most weights is the teacher and the one with the fewest the student; of the text
    files, the largest is taken. Options name others.
    """
    from xtoken_core.errors import ConfigError
    from xtoken_services.cli.starter import find_inputs, starter_text

    if out.exists():
        raise ConfigError(f"{out} exists already: choose another file with --out, or remove it")
    inputs = find_inputs(out.resolve().parent, student=student, teacher=teacher, data=data)
    try:
        out.write_text(starter_text(inputs), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from error
    if as_json:
        typer.echo(json.dumps({"file": str(out), **asdict(inputs)}, indent=2))
        return
    for name, path in (("student", inputs.student), ("teacher", inputs.teacher), ("data", inputs.data)):
        typer.echo(f"{name}: {path}")
    typer.echo(
        f"wrote {out}: see what it amounts to with `xtoken run {out} --dry-run`, start it with `xtoken run {out}`"
    )
