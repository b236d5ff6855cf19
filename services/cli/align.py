"""`xtoken align`: see how two tokenizers cut a text into chunks, and count it over files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import numpy as np
    from rich.text import Text

    from xtoken_core.alignment import AlignmentBatch, TokenAligner
    from xtoken_core.alignment.report import AlignmentReport, ShownToken
    from xtoken_core.dataset import DataIndex
    from xtoken_core.tokenizing import TextTokenizer

align_app = typer.Typer(
    name="align", help="Look at the alignment of two tokenizations of one text.", no_args_is_help=True
)

StudentOption = Annotated[Path, typer.Option("--student", help="The student's directory (model or tokenizer).")]
TeacherOption = Annotated[Path, typer.Option("--teacher", help="The teacher's directory.")]

_BATCH_CHARACTERS = 1 << 19
_BATCH_RECORDS = 64

_Text = tuple[str, str | None, str]
"""A record's location, its text, and the reason if it has none."""


@dataclass(frozen=True)
class _Misfit:
    """Text with unmatched tokens other than those at its ends."""

    place: str
    student_tokens: int
    teacher_tokens: int


@dataclass(frozen=True)
class _Check:
    """Result of `align check` for a file, or for all.

    Attributes:
        records: Records, usable or not.
        skipped: Those that cannot be used.
        misfits: Texts with tokens in no chunk, other than the specials and the space that a tokenizer sets around every
            text and what a cut has left without its counterpart.
        first_skipped: Place and reason of the first of them.
        first_misfit: The first of those.
    """

    records: int = 0
    skipped: int = 0
    misfits: int = 0
    first_skipped: tuple[str, str] | None = None
    first_misfit: _Misfit | None = None

    def __add__(self, other: _Check) -> _Check:
        first = (getattr(self, f.name) or getattr(other, f.name) for f in fields(self)[3:])
        return _Check(self.records + other.records, self.skipped + other.skipped, self.misfits + other.misfits, *first)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        skipped, misfit = self.first_skipped, self.first_misfit
        return {
            "records": self.records,
            "skipped": self.skipped,
            "first_skipped": {"place": skipped[0], "reason": skipped[1]} if skipped else None,
            "records_with_misfits": self.misfits,
            "first_misfit": vars(misfit) if misfit else None,
        }

    def lines(self) -> Iterator[str]:
        """Yield lines for the terminal."""
        yield f"  {'records':<26} {self.records:>14,}"
        skipped, misfit = self.first_skipped, self.first_misfit
        yield f"  {'skipped':<26} {self.skipped:>14,}" + (f"  first: {': '.join(skipped)}" if skipped else "")
        where = f"  first: {misfit.place}: {misfit.student_tokens} of the student" if misfit else ""
        where += f" and {misfit.teacher_tokens} of the teacher in no chunk" if misfit else ""
        yield f"  {'records_with_misfits':<26} {self.misfits:>14,}{where}"


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
    """Align every text of some files and count chunks; fails if a chunk does not spell the same on both sides.

    Records that cannot be used are counted as skipped. A record with misfits has tokens in no chunk beyond those that
    any text may have: specials and a space that a tokenizer sets around it, and the rest of a text that was cut.
    """
    from services.common.progress import progress_bar
    from xtoken_core.alignment.report import AlignmentReport
    from xtoken_core.errors import XtokenError

    aligner, ours, theirs = _sides(student, teacher)
    results: dict[str, tuple[_Check, AlignmentReport]] = {}
    first_bad = ""
    for path in files:
        report, checked = AlignmentReport(), _Check()
        with progress_bar(f"aligning {path.name}", quiet=as_json) as advance, _texts(path, field) as (texts, records):
            for batch in _batches(texts):
                skipped = [(place, reason) for place, text, reason in batch if text is None]
                usable = [(place, text) for place, text, _ in batch if text is not None]
                counts, misfits, bad = _align_batch(aligner, ours, theirs, usable, context)
                first_bad = first_bad or bad
                report += counts
                checked += _Check(
                    len(batch), len(skipped), len(misfits), next(iter(skipped), None), next(iter(misfits), None)
                )
                advance(checked.records, records)
        results[str(path)] = checked, report
    total = sum((report for _, report in results.values()), start=AlignmentReport())
    whole = sum((checked for checked, _ in results.values()), start=_Check())
    if as_json:
        shown = {name: checked.as_dict() | report.as_dict() for name, (checked, report) in results.items()}
        both = {"files": shown, "total": whole.as_dict() | total.as_dict(), "notes": list(aligner.notes)}
        typer.echo(json.dumps(both, indent=2))
    else:
        for name, (checked, report) in {**results, "total": (whole, total)}.items():
            typer.echo(name)
            for line in checked.lines():
                typer.echo(line)
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
    aligner: TokenAligner,
    ours: TextTokenizer,
    theirs: TextTokenizer,
    records: Sequence[tuple[str, str]],
    context: int | None,
) -> tuple[AlignmentReport, list[_Misfit], str]:
    """Return counts of some texts, those with unmatched tokens, and the record of the first unequal chunk."""
    from dataclasses import replace
    from time import perf_counter

    import torch

    from xtoken_core.alignment.report import AlignmentReport, summarize

    if not records:
        return AlignmentReport(), [], ""
    texts = [text for _, text in records]
    whole = [side.encode(texts, specials=True) for side in (ours, theirs)]
    sides = []
    for encoded in whole:
        rows = [ids[:context] for ids in encoded]
        width = max(map(len, rows))
        ids, mask = (torch.zeros((len(rows), width), dtype=torch.int64) for _ in range(2))
        for row, kept in enumerate(rows):
            ids[row, : len(kept)], mask[row, : len(kept)] = torch.from_numpy(kept), 1
        sides.append((ids, mask))
    (s, s_mask), (t, t_mask) = sides
    began = perf_counter()
    batch = aligner.align(s, t, student_attention_mask=s_mask, teacher_attention_mask=t_mask, texts=texts)
    seconds = perf_counter() - began
    unequal = (batch.pair_valid & ~batch.pair_is_correct).any(dim=1).nonzero()
    bad = records[int(unequal[0])][0] if len(unequal) else ""
    misfits = list(_misfits(records, (ours, theirs), whole, batch, context))
    return replace(summarize(aligner, batch, s, s_mask, t_mask), seconds=seconds), misfits, bad


def _misfits(
    records: Sequence[tuple[str, str]],
    sides: tuple[TextTokenizer, TextTokenizer],
    ids: Sequence[Sequence[np.ndarray]],
    batch: AlignmentBatch,
    context: int | None,
) -> Iterator[_Misfit]:
    """Yield the texts with unmatched tokens other than those at their ends; `ids` are uncut."""
    chunks = (batch.student_chunk_id.numpy(), batch.teacher_chunk_id.numpy())
    for row, (place, _) in enumerate(records):
        cut = context is not None and any(len(encoded[row]) > context for encoded in ids)
        left = [
            _unmatched(side, encoded[row], chunk[row][: len(encoded[row])], cut=cut)
            for side, encoded, chunk in zip(sides, ids, chunks, strict=True)
        ]
        if any(left):
            yield _Misfit(place, *left)


def _unmatched(side: TextTokenizer, ids: np.ndarray, chunk: np.ndarray, *, cut: bool) -> int:
    """Return the number of unmatched tokens of a row, without those that any text may have at its ends."""
    before, after = side.ends
    begin, end = 0, len(chunk)
    if before and ids[: len(before)].tolist() == before:
        begin = len(before)
    if cut:  # behind the last chunk the other side has nothing any more
        within = (chunk >= 0).nonzero()[0]
        end = int(within[-1]) + 1 if len(within) else 0
    elif after and ids[-len(after) :].tolist() == after:
        end -= len(after)
    if side.table.prefix != "none" and begin < end and side.table.pieces[int(ids[begin])] == b" ":
        begin += 1
    return int((chunk[begin:end] < 0).sum())


def _batches(records: Iterable[_Text]) -> Iterator[list[_Text]]:
    """Yield the records in batches."""
    batch: list[_Text] = []
    size = 0
    for entry in records:
        batch.append(entry)
        size += len(entry[1] or "")
        if len(batch) >= _BATCH_RECORDS or size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextmanager
def _texts(path: Path, field: str) -> Iterator[tuple[Iterable[_Text], int]]:
    """Open a file: its records and their number; a file of another kind than those of a run is one text."""
    import tempfile

    from xtoken_core.dataset import DataIndex

    if path.is_dir() or path.suffix.lower() in (".jsonl", ".parquet", ".txt"):
        with tempfile.TemporaryDirectory() as cache:
            index = DataIndex.build([path], field=field, cache_dir=Path(cache))
            yield _records(index), len(index)
    else:
        yield [(str(path), _text(None, path), "")], 1


def _records(index: DataIndex) -> Iterator[_Text]:
    from xtoken_core.dataset import BadRecord

    for number in range(len(index)):
        (record,) = index.read([number])
        if isinstance(record, BadRecord):
            yield record.location, None, record.reason
        else:
            yield index.location(number), record.document, ""


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
