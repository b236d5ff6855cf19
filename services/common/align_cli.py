"""`xtoken align`: see how two tokenizers cut a text into chunks, and count it over files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.text import Text

    from xtoken_core.alignment import TokenAligner
    from xtoken_core.alignment.report import AlignmentReport, ShownToken
    from xtoken_core.tokenizing import TextTokenizer

align_app = typer.Typer(
    name="align", help="Look at the alignment of two tokenizations of one text.", no_args_is_help=True
)

StudentOption = Annotated[Path, typer.Option("--student", help="The student's directory (model or tokenizer).")]
TeacherOption = Annotated[Path, typer.Option("--teacher", help="The teacher's directory.")]

_BATCH_CHARACTERS = 1 << 19
_BATCH_RECORDS = 64


@align_app.command()
def show(
    student: StudentOption,
    teacher: TeacherOption,
    text: Annotated[str | None, typer.Argument(help="The text.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option("--file", help="A file with the text.", show_default=False)] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page too.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print both tokenizations of a text, every chunk in one colour; grey is in no chunk, red does not agree."""
    from dataclasses import asdict

    from rich.console import Console

    from xtoken_core.alignment.report import alignment_html
    from xtoken_core.errors import InputError

    source = _text(text, file)
    aligner, ours, theirs = _sides(student, teacher)
    sides = _shown(aligner, ours, theirs, source)
    if as_json:
        shown = [{"name": name, "tokens": [asdict(token) for token in tokens]} for name, tokens in sides]
        typer.echo(json.dumps({"sides": shown, "notes": list(aligner.notes)}))
    else:
        console = Console()
        for name, tokens in sides:
            console.print(f"{name}: {len(tokens)} tokens, {len({t.chunk for t in tokens} - {-1})} chunks", style="bold")
            console.print(_coloured(tokens))
        for note in aligner.notes:
            console.print(f"note: {note}")
    if html is not None:
        try:
            html.write_text(alignment_html("Alignment", sides), encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {html}: {error.strerror}") from error


@align_app.command()
def check(
    student: StudentOption,
    teacher: TeacherOption,
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help=".jsonl, .parquet, .txt or other text.")],
    field: Annotated[str, typer.Option("--field", help="The field of a record that holds the text.")] = "text",
    context: Annotated[
        int | None, typer.Option("--context", min=1, help="Cut both sides to so many tokens.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Align every text of some files and count chunks; fails if a chunk does not spell the same on both sides."""
    from services.common.busy import counted
    from xtoken_core.alignment.report import AlignmentReport
    from xtoken_core.errors import XtokenError

    aligner, ours, theirs = _sides(student, teacher)
    reports: dict[str, AlignmentReport] = {}
    first_bad = ""
    for path in files:
        report, done = AlignmentReport(), 0
        with counted(f"aligning {path.name}", quiet=as_json) as tell, _texts(path, field) as (texts, records):
            for batch in _batches(texts):
                counts, bad = _align_batch(aligner, ours, theirs, batch, context)
                if bad is not None and not first_bad:
                    first_bad = f"record {done + bad} of {path}"
                report += counts
                done += len(batch)
                tell(done, records)
        reports[str(path)] = report
    total = sum(reports.values(), start=AlignmentReport())
    if as_json:
        found = {"files": {name: report.as_dict() for name, report in reports.items()}, "total": total.as_dict()}
        typer.echo(json.dumps(found | {"notes": list(aligner.notes)}, indent=2))
    else:
        for name, report in {**reports, "total": total}.items():
            typer.echo(name)
            for key, value in report.as_dict().items():
                typer.echo(f"  {key:<26} {value:>14,.0f}")
        for note in aligner.notes:
            typer.echo(f"note: {note}", err=True)
    if total.equal_chunks != total.chunks:
        raise XtokenError(
            f"{total.chunks - total.equal_chunks} of {total.chunks} chunks do not spell the same on both sides, the "
            f"first in {first_bad}: a special token's name inside the text does that; look at it with xtoken align show"
        )


def _align_batch(
    aligner: TokenAligner, ours: TextTokenizer, theirs: TextTokenizer, texts: list[str], context: int | None
) -> tuple[AlignmentReport, int | None]:
    """Counts, and the first text with a chunk that does not spell the same on both sides."""
    from dataclasses import replace
    from time import perf_counter

    import torch

    from xtoken_core.alignment.report import summarize

    sides = []
    for side in (ours, theirs):
        rows = [ids[:context] for ids in side.encode(texts, specials=True)]
        width = max(map(len, rows))
        ids, mask = (torch.zeros((len(rows), width), dtype=torch.int64) for _ in range(2))
        for row, found in enumerate(rows):
            ids[row, : len(found)], mask[row, : len(found)] = torch.from_numpy(found), 1
        sides.append((ids, mask))
    (s, s_mask), (t, t_mask) = sides
    began = perf_counter()
    batch = aligner.align(s, t, student_attention_mask=s_mask, teacher_attention_mask=t_mask, texts=texts)
    seconds = perf_counter() - began
    unequal = (batch.pair_valid & ~batch.pair_is_correct).any(dim=1).nonzero()
    bad = int(unequal[0]) if len(unequal) else None
    return replace(summarize(aligner, batch, s, s_mask, t_mask), seconds=seconds), bad


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """The texts, some at a time."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if len(batch) >= _BATCH_RECORDS or size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextmanager
def _texts(path: Path, field: str) -> Iterator[tuple[Iterable[str], int]]:
    """The texts of a file and how many records it has; a file of another kind than those of a run is one text."""
    import tempfile

    from xtoken_core.data import DataIndex

    if path.is_dir() or path.suffix.lower() in (".jsonl", ".parquet", ".txt"):
        with tempfile.TemporaryDirectory() as cache:
            index = DataIndex.build([path], field=field, cache_dir=Path(cache))
            yield index.documents(), len(index)
    else:
        yield [_text(None, path)], 1


def _text(text: str | None, file: Path | None) -> str:
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


def _sides(student: Path, teacher: Path) -> tuple[TokenAligner, TextTokenizer, TextTokenizer]:
    from services.common.tokenizers import load_tokenizer
    from xtoken_core.alignment import TokenAligner
    from xtoken_core.tokenizing import TextTokenizer

    ours, theirs = load_tokenizer(student, "student"), load_tokenizer(teacher, "teacher")
    return TokenAligner(ours, theirs), TextTokenizer(ours, "student"), TextTokenizer(theirs, "teacher")


def _shown(
    aligner: TokenAligner, ours: TextTokenizer, theirs: TextTokenizer, source: str
) -> list[tuple[str, list[ShownToken]]]:
    import torch

    from xtoken_core.alignment.report import shown_tokens

    s, t = (torch.from_numpy(side.encode([source], specials=True)[0]) for side in (ours, theirs))
    batch = aligner.align(s[None], t[None], student_attention_mask=None, teacher_attention_mask=None, texts=[source])
    correct = batch.pair_is_correct[0].numpy()
    return [
        ("student", shown_tokens(aligner.student, s.tolist(), batch.student_chunk_id[0], correct)),
        ("teacher", shown_tokens(aligner.teacher, t.tolist(), batch.teacher_chunk_id[0], correct)),
    ]


def _coloured(tokens: list[ShownToken]) -> Text:
    from rich.text import Text

    from xtoken_core.alignment.report import colour

    line = Text()
    for token in tokens:
        line.append(token.text, style=f"black on {colour(token)}")
        line.append("\u200b|", style="dim")
    return line
