"""`xtoken data`: what a run would make of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtoken_services.cli.options import JsonOption
from xtoken_services.common.processes.progress import progress_bar

if TYPE_CHECKING:
    from xtoken_core.collate import CrossTokenizerCollator

data_app = typer.Typer(name="data", help="Look at the text of a run.", no_args_is_help=True)


@data_app.callback()
def data() -> None:
    """Look at the text of a run."""


@data_app.command()
def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="Files that a run reads.")],
    field: Annotated[str, typer.Option("--field", help="The field of a record that holds the text.")] = "text",
    student: Annotated[
        Path | None, typer.Option("--student", help="The student's directory: tokenize the records, as in a run.")
    ] = None,
    teacher: Annotated[Path | None, typer.Option("--teacher", help="The teacher's, with --student.")] = None,
    context: Annotated[
        int | None, typer.Option("--context", min=1, help="Tokens of the student's context.", show_default="a run's")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Count the records that a run would use, cut at the contexts or skip and why, with the first of each kind.

    Without --student records are only read, which finds neither those that are cut nor those that a tokenizer or a chat
    template cannot take.
    """
    import tempfile

    from xtoken_core.dataset import DataIndex
    from xtoken_core.errors import ConfigError
    from xtoken_services.common.text.record_counts import count_records

    if student is None and (teacher or context):
        raise ConfigError("--teacher and --context need --student: nothing is tokenized without it")
    collator = _collator(student, teacher, context) if student else None
    results: dict[str, Any] = {}
    for file in files:
        with tempfile.TemporaryDirectory() as cache, progress_bar(f"reading {file.name}", quiet=as_json) as advance:
            index = DataIndex.build([file], field=field, cache_dir=Path(cache), progress=advance)
            results[str(file)] = count_records(index, collator, advance)
    if as_json:
        typer.echo(json.dumps({"files": results}, indent=2, ensure_ascii=False))
        return
    for name, found in results.items():
        form = f" of {found['form']}, read as messages" if found["form"] else ""
        typer.echo(f"{name}: {found['records']:,} records{form}")
        typer.echo(f"  used        {found['used']:>12,}")
        if collator is not None:
            typer.echo(
                f"  of them cut {found['cut']:>12,}" + (f"  first: {found['first_cut']}" if found["cut"] else "")
            )
        for kind in found["skipped"]:
            typer.echo(f"  skipped     {kind['records']:>12,}  first: {kind['first']}: {kind['reason']}")


def _collator(student: Path, teacher: Path | None, context: int | None) -> CrossTokenizerCollator:
    """Return the collator of a run with these models and otherwise its defaults."""
    from xtoken_core.collate import CrossTokenizerCollator
    from xtoken_services.common.run.defaults import RunDefaults, fill_model_defaults
    from xtoken_services.common.run.machine import Machine
    from xtoken_services.common.tokenizers.loading import load_tokenizer

    tables = [{"model": str(model.absolute())} for model in (student, teacher) if model]
    document: dict[str, Any] = {"student": tables[0] | ({"context_length": context} if context else {})}
    document["teacher"] = tables[1:]
    fill_model_defaults(RunDefaults(document, {}, Machine.of_this()), Path())
    return CrossTokenizerCollator(
        student_tokenizer=load_tokenizer(student, "student"),
        teacher_tokenizer=load_tokenizer(teacher, "teacher") if teacher else None,
        aligner=None,
        ctx_length_student=document["student"]["context_length"],
        ctx_length_teacher=[each["context_length"] for each in document["teacher"]] or [None],
    )
