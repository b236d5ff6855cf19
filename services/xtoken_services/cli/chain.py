"""`xtoken chain`: what the tables of the chain divergence say about two tokenizers and a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtoken_services.cli.options import JsonOption, SpecialTokensOption, StudentOption, TeacherOption
from xtoken_services.common.processes.progress import spinner
from xtoken_services.common.tokenizers.special_tokens import parse_special_tokens

if TYPE_CHECKING:
    from xtoken_core.chain.report import SideReport, TextReport

chain_app = typer.Typer(
    name="chain", help='Look at the tables of the chain divergence (loss.mode = "chain").', no_args_is_help=True
)


@chain_app.callback()
def chain() -> None:
    """Inspect the tables of the chain divergence."""


@chain_app.command()
def inspect(
    student: StudentOption,
    teacher: TeacherOption,
    text: Annotated[str | None, typer.Argument(help="A text.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="A file with a text.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Examples of each kind.")] = 5,
    special_token: SpecialTokensOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show common tokens, tokens without a root and why, and a text's chunks by shape.

    The tables are read from the cache, or built and kept there.
    """
    from dataclasses import asdict

    from xtoken_core.alignment import token_table
    from xtoken_core.alignment.report import shown_sides
    from xtoken_core.chain.build import cached_tables
    from xtoken_core.chain.report import side_report, text_report
    from xtoken_services.cli.align import read_text
    from xtoken_services.common.tokenizers.loading import load_tokenizer, sides_of

    pairs = parse_special_tokens(special_token or (), "--special-token")
    source = None if text is None and file is None else read_text(text, file)
    with spinner("reading both tokenizers and their chain tables", quiet=as_json):
        tokenizers = load_tokenizer(student, "student"), load_tokenizer(teacher, "teacher")
        tables = cached_tables(*tokenizers, special_tokens=pairs)
        reports = {
            name: side_report(side, tables.classes, token_table(tokenizer), samples=samples)
            for name, side, tokenizer in zip(
                ("student", "teacher"), (tables.student, tables.teacher), tokenizers, strict=True
            )
        }
    of_text: TextReport | None = None
    if source is not None:
        aligner, *encoders = sides_of(*tokenizers, pairs)
        ids = [side.encode([source], specials=True)[0].tolist() for side in encoders]
        tokens = [side for _, side in shown_sides(aligner, encoders[0], encoders[1], source)]
        of_text = text_report(tokens, ids, tables, samples=samples)
    if as_json:
        shown: dict[str, Any] = {"classes": tables.classes, "common": tables.common}
        shown |= {name: asdict(report) for name, report in reports.items()}
        shown["text"] = None if of_text is None else asdict(of_text)
        typer.echo(json.dumps(shown, ensure_ascii=False, indent=2))
        return
    typer.echo(f"common tokens      {tables.common}, and {tables.classes - tables.common} pairs of specials")
    for name, report in reports.items():
        _print_side(name, report)
    if of_text is not None:
        _print_text(of_text)


def _print_side(name: str, report: SideReport) -> None:
    typer.echo(f"{name:<18} {report.tokens} tokens, {report.with_root} with a root")
    for reason, count in report.without_root.items():
        examples = ", ".join(map(repr, report.examples[reason]))
        typer.echo(f"  {count:>7} without: {reason}" + (f" ({examples})" if examples else ""))
    typer.echo("  spelled by " + ", ".join(f"{n}: {count}" for n, count in report.spelled.items()) + " tokens")


def _print_text(report: TextReport) -> None:
    typer.echo(f"text               {report.chunks} chunks, {report.incorrect} more that are not correct")
    for shape, count in report.shapes.items():
        fraction = count / max(report.chunks, 1)
        examples = "; ".join(f"{ours} = {theirs}" for ours, theirs in report.examples[shape])
        typer.echo(f"  {shape}  {count:>7}  {fraction:6.1%}" + (f"  {examples}" if examples else ""))
    typer.echo(f"  tokens without a root: {report.rootless[0]} of the student, {report.rootless[1]} of the teacher")
