"""`xtoken projection`: build a projection, look into one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from xtoken_services.cli.options import JsonOption, SpecialTokensOption, StudentOption, TeacherOption
from xtoken_services.common.processes.progress import spinner
from xtoken_services.common.tokenizers.special_tokens import parse_special_tokens

projection_app = typer.Typer(
    name="projection", help="Build a projection between two vocabularies and look into it.", no_args_is_help=True
)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A projection file.")]


@projection_app.command()
def build(
    student: StudentOption,
    teacher: TeacherOption,
    out: Annotated[Path, typer.Option("--out", help="FILE.safetensors names its pair; others are torch files.")],
    top_k: Annotated[int, typer.Option(min=1, max=32, help="Entries of a row, at most.")] = 4,
    forward: Annotated[bool, typer.Option(help="Student tokens re-tokenized by the teacher.")] = True,
    reverse: Annotated[bool, typer.Option(help="Teacher tokens re-tokenized by the student, added.")] = False,
    specials: Annotated[bool, typer.Option(help="Specials whose names mean the same pinned to each other.")] = True,
    exact: Annotated[bool, typer.Option(help="Tokens of equal bytes pinned to each other.")] = True,
    as_reference: Annotated[bool, typer.Option(help="Build as the public tools do, for comparison.")] = False,
    special_token: SpecialTokensOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build the projection from a student's vocabulary to a teacher's."""
    from xtoken_core.projection.build import BuildOptions, build_projection
    from xtoken_core.projection.files import write_projection

    pairs = parse_special_tokens(special_token or (), "--special-token")
    options = BuildOptions(forward, reverse, specials, exact, top_k, as_reference)
    with spinner("reading both vocabularies and building the projection", quiet=as_json):
        ours, theirs = _tokenizer(student, "student"), _tokenizer(teacher, "teacher")
        projection = build_projection(ours, theirs, options, student_rows=_head_width(student), special_tokens=pairs)
        write_projection(projection, out, bfloat16=as_reference)
    pinned = int((projection.likelihoods[:, 0] == 1).sum())
    empty = int((projection.likelihoods.sum(dim=1) == 0).sum())
    rows = len(projection.indices)
    if as_json:
        result = {"file": str(out), "rows": rows, "top_k": top_k, "one_counterpart": pinned, "empty": empty}
        typer.echo(json.dumps(result, indent=2))
        return
    typer.echo(f"{out}: {rows} rows of {top_k}, {pinned} with one counterpart, {empty} empty")


@projection_app.command()
def inspect(
    file: FileArgument,
    student: StudentOption,
    teacher: TeacherOption,
    samples: Annotated[int, typer.Option(min=0, help="Rows shown of each kind.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Show what a projection covers, and warn where it is thin."""
    from xtoken_core.projection import report
    from xtoken_core.projection.files import read_topk
    from xtoken_services.common.tables.pair_files import check_projection_pair

    check_projection_pair(file, student, teacher)
    with spinner("reading both vocabularies", quiet=as_json):
        summary = report.inspect_projection(
            read_topk(file), _table(student, "student"), _table(teacher, "teacher"), samples=samples
        )
    if as_json:
        typer.echo(json.dumps(report.as_json(summary), ensure_ascii=False, indent=2))
        return
    typer.echo(f"rows               {summary.rows} of up to {summary.top_k} teacher tokens")
    typer.echo(f"  one counterpart  {summary.exact}")
    typer.echo(f"  several          {summary.spread}")
    beyond = f", {summary.padding} of them rows of the head beyond the vocabulary" if summary.padding else ""
    typer.echo(f"  none             {summary.empty}{beyond}")
    typer.echo(f"teacher tokens     {summary.teacher_covered} named by some row")
    typer.echo(
        f"common tokens      {summary.common_strict} strict, {summary.common_relaxed} relaxed "
        "(paired by the projection, specials too)"
    )
    typer.echo("uncommon by category:")
    for name, (total, uncommon) in summary.categories.items():
        typer.echo(f"  {name:<20} {uncommon:>7} of {total}")
    for kind, rows in summary.samples.items():
        if rows:
            typer.echo(f"{kind}:")
        for name, row in rows:
            typer.echo(f"  {_quoted(name)} -> " + (", ".join(f"{_quoted(t)} {w:.3f}" for t, w in row) or "nothing"))
    for warning in summary.warnings:
        typer.echo(f"warning: {warning}", err=True)


def _tokenizer(directory: Path, what: str) -> Any:
    from xtoken_services.common.tokenizers.loading import load_tokenizer

    return load_tokenizer(directory, what)


def _head_width(directory: Path) -> int | None:
    """Return the rows of the head of the model in a directory; None if there is only a tokenizer."""
    from xtoken_core.regular_files import json_object_or_empty

    config = json_object_or_empty(directory / "config.json")
    text = config.get("text_config", config)
    width = text.get("vocab_size") if isinstance(text, dict) else None
    return width if isinstance(width, int) else None


def _quoted(name: str) -> str:
    """Return a token's name as it is shown: what does not print is escaped, what is escaped already stays."""
    return "'" + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name) + "'"


def _table(directory: Path, what: str) -> Any:
    from xtoken_core.alignment import token_table

    return token_table(_tokenizer(directory, what))
