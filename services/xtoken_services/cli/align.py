"""`xtoken align`: see how two tokenizers cut a text into chunks, and count it over files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xtoken_services.cli.options import JsonOption, SpecialTokensOption, StudentOption, TeacherOption
from xtoken_services.common.processes.progress import progress_bar, spinner
from xtoken_services.common.tokenizers.special_tokens import parse_special_tokens

if TYPE_CHECKING:
    from rich.text import Text

    from xtoken_core.alignment import TokenAligner
    from xtoken_core.alignment.check import CheckReport, Record
    from xtoken_core.alignment.report import ShownToken
    from xtoken_core.dataset import DataIndex
    from xtoken_core.tokenizing import TextTokenizer

align_app = typer.Typer(
    name="align", help="Look at the alignment of two tokenizations of one text.", no_args_is_help=True
)


_BATCH_CHARACTERS = 1 << 19
_BATCH_RECORDS = 64
_MEASURED_CHARACTERS = 1 << 15
_COVERAGE = {
    "unnamed_tokens_of_text": "teacher tokens that no row of the projection names",
    "unreachable_mass": "teacher's probability on such tokens",
}


@align_app.command()
def show(
    student: StudentOption,
    teacher: TeacherOption,
    text: Annotated[str | None, typer.Argument(help="The text.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="A file with the text.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page too.")] = None,
    special_token: SpecialTokensOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print both tokenizations of a text, every chunk in one colour; grey is in no chunk, red does not agree.

    On a pipe it prints a line per chunk: the student's tokens, the teacher's, and what is wrong with it.
    """
    from dataclasses import asdict

    from rich.console import Console

    from xtoken_core.alignment.report import alignment_html, plain_chunks, shown_sides
    from xtoken_core.errors import InputError, os_errors_as

    source = read_text(text, file)
    aligner, ours, theirs = _sides(student, teacher, special_token)
    sides = shown_sides(aligner, ours, theirs, source)
    if as_json:
        shown = [{"name": name, "tokens": [asdict(token) for token in tokens]} for name, tokens in sides]
        typer.echo(json.dumps({"sides": shown, "notes": list(aligner.notes)}))
    else:
        console = Console()
        for name, tokens in sides:
            console.print(f"{name}: {len(tokens)} tokens, {len({t.chunk for t in tokens} - {-1})} chunks", style="bold")
            if console.is_terminal:
                console.print(_coloured(tokens))
        if not console.is_terminal:
            typer.echo("\n".join(plain_chunks(*(tokens for _, tokens in sides))))
        for note in aligner.notes:
            console.print(f"note: {note}")
    if html is not None:
        with os_errors_as(InputError, f"cannot write {html}"):
            html.write_text(alignment_html("Alignment", sides), encoding="utf-8")


@align_app.command()
def check(
    student: StudentOption,
    teacher: TeacherOption,
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="Files that a run reads, or other text.")],
    field: Annotated[str, typer.Option("--field", help="The field of a record that holds the text.")] = "text",
    context: Annotated[int | None, typer.Option("--context", min=1, help="Cut both sides to so many tokens.")] = None,
    special_token: SpecialTokensOption = None,
    projection: Annotated[
        Path | None, typer.Option("--projection", help="Measure its coverage of the texts' beginning.")
    ] = None,
    mass: Annotated[
        bool, typer.Option("--mass", help="With --projection: the teacher's probability on uncovered tokens.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Align every text of some files and count chunks; fails if a chunk does not spell the same on both sides.

    It also fails if no text has one that does. Records that cannot be used are skipped. A record with misfits has
    tokens in no chunk beyond specials and a space that a tokenizer sets around it, and the rest of a text that was cut.
    Of messages the answers are aligned.
    """
    from xtoken_core.alignment.check import CheckReport
    from xtoken_core.errors import ConfigError, XtokenError

    if mass and projection is None:
        raise ConfigError("--mass measures what a projection leaves out: name one with --projection")
    sides = _sides(student, teacher, special_token)
    reports, beginning = _check_files(sides, files, field, context, quiet=as_json)
    total, notes = sum(reports.values(), start=CheckReport()), list(sides[0].notes)
    coverage: dict[str, float] = {}
    if projection is not None:
        from xtoken_services.common.tables.coverage import coverage_of_text

        with spinner("measuring the texts' beginning", quiet=as_json):
            coverage = coverage_of_text(projection, teacher, beginning, mass=mass)
    if as_json:
        shown = {name: report.as_dict() for name, report in reports.items()}
        typer.echo(json.dumps({"files": shown, "total": total.as_dict(), "notes": notes, **coverage}, indent=2))
    else:
        for name, report in {**reports, **({"total": total} if len(reports) > 1 else {})}.items():
            typer.echo("\n".join([name, *report.lines()]))
        for name, fraction in coverage.items():
            typer.echo(f"{_COVERAGE[name]}: {fraction:.1%}")
        for note in notes:
            typer.echo(f"note: {note}", err=True)
    if total.counts.incorrect_chunks:
        raise XtokenError(
            f"{total.counts.incorrect_chunks} of {total.counts.chunks} chunks do not spell the same on both sides, the "
            f"first in {total.first_incorrect}; look at it with xtoken align show"
        )
    if not total.is_usable:
        example = total.example or "there is no text to align"
        raise XtokenError(f"none of {total.records} texts has a chunk that both sides spell: {example}")


def _check_files(
    sides: tuple[TokenAligner, TextTokenizer, TextTokenizer],
    files: Sequence[Path],
    field: str,
    context: int | None,
    *,
    quiet: bool,
) -> tuple[dict[str, CheckReport], str]:
    """Return a report of every file, and the beginning of their texts."""
    from xtoken_core.alignment.check import CheckReport, check_records

    aligner, ours, theirs = sides
    reports: dict[str, CheckReport] = {}
    beginning = ""
    for path in files:
        report = CheckReport()
        with (
            progress_bar(f"aligning {path.name}", quiet=quiet) as advance,
            _records(path, field, (ours, theirs)) as (records, count),
        ):
            for batch in _batches(records):
                report += check_records(aligner, ours, theirs, batch, context=context)
                advance(report.records, count)
                if len(beginning) < _MEASURED_CHARACTERS:
                    beginning += "".join(f"{record.text}\n" for record in batch if record.text)
        reports[str(path)] = report
    return reports, beginning[:_MEASURED_CHARACTERS]


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yield the records in batches of so many characters, and of so many records at most."""
    from xtoken_core.packing import groups_within

    least = _BATCH_CHARACTERS // _BATCH_RECORDS
    return groups_within(records, lambda record: max(least, len(record.text or "")), _BATCH_CHARACTERS)


@contextmanager
def _records(path: Path, field: str, sides: Sequence[TextTokenizer]) -> Iterator[tuple[Iterable[Record], int]]:
    """Open a file and yield its records and their number; a file of a kind that runs do not read is one record."""
    import tempfile

    from xtoken_core.alignment.check import Record
    from xtoken_core.config.data import READ_SUFFIXES
    from xtoken_core.dataset import DataIndex

    if path.is_dir() or path.name.lower().endswith(READ_SUFFIXES):
        with tempfile.TemporaryDirectory() as cache:
            index = DataIndex.build([path], field=field, cache_dir=Path(cache))
            yield _indexed(index, sides), len(index)
    else:
        yield [Record(str(path), read_text(None, path))], 1


def _indexed(index: DataIndex, sides: Sequence[TextTokenizer]) -> Iterator[Record]:
    """Yield the records; of messages, rendered by each side's chat template, the answers are aligned, as in a run."""
    from functools import partial

    from xtoken_core.alignment.check import Record
    from xtoken_core.dataset import BadRecord
    from xtoken_core.tokenizing import only_answer, tokenize_conversation

    for number in range(len(index)):
        (record,) = index.read([number])
        if isinstance(record, BadRecord):
            yield Record(record.location, None, record.reason)
        elif "messages" in record.value:
            messages = record.value["messages"]
            # An end of turn spells no text.
            tokenize = partial(tokenize_conversation, sides, messages, ends=False, tools=record.value.get("tools"))
            yield Record(index.location(number), only_answer(messages), tokenize=tokenize)
        else:
            yield Record(index.location(number), record.document)


def read_text(text: str | None, file: Path | None) -> str:
    """Return the text that a command was given, by itself or in a file.

    Raises:
        ConfigError: Both were given, or neither.
        InputError: The file cannot be read, or is not UTF-8.
    """
    from xtoken_core.errors import ConfigError, InputError

    if (text is None) == (file is None):
        raise ConfigError("give either a text or --file")
    if file is None:
        return str(text)
    try:
        return file.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text: byte {error.start}") from error


def _sides(
    student: Path, teacher: Path, special_token: list[str] | None
) -> tuple[TokenAligner, TextTokenizer, TextTokenizer]:
    from xtoken_services.common.tokenizers.loading import load_tokenizer, sides_of

    pairs = parse_special_tokens(special_token or (), "--special-token")
    return sides_of(load_tokenizer(student, "student"), load_tokenizer(teacher, "teacher"), pairs)


def _coloured(tokens: list[ShownToken]) -> Text:
    from rich.text import Text

    from xtoken_core.alignment.report import colour

    line = Text()
    for token in tokens:
        line.append(token.text, style=f"black on {colour(token)}")
        line.append("\u200b|", style="dim")
    return line
