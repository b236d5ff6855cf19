"""`xtoken data`: what a run would make of a text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtoken_services.cli.options import JsonOption
from xtoken_services.common.processes.progress import spinner

if TYPE_CHECKING:
    from xtoken_core.collate import CrossTokenizerCollator
    from xtoken_core.dataset import DataIndex

data_app = typer.Typer(name="data", help="Look at the text of a run.", no_args_is_help=True)
BATCH = 64
USED, CUT = "used", "cut, of those used"
PARTICULARS = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")
"""What differs between two reasons of one kind."""


@data_app.callback()
def data() -> None:
    """Look at the text of a run."""


@data_app.command()
def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="Files that a run reads.")],
    field: Annotated[str, typer.Option("--field", help="The field of a record that holds the text.")] = "text",
    student: Annotated[Path | None, typer.Option("--student", help="Tokenize as a run does: its directory.")] = None,
    teacher: Annotated[Path | None, typer.Option("--teacher", help="The teacher's, with --student.")] = None,
    context: Annotated[int, typer.Option("--context", min=1, help="The student's context_length.")] = 1024,
    as_json: JsonOption = False,
) -> None:
    """Count the records that a run would use, cut at the contexts or skip and why, with the first of each kind.

    Without --student records are only read, which finds neither those that are cut nor those that a tokenizer or a chat
    template cannot take. The teacher's context is that of a run file without one.
    """
    import tempfile

    from xtoken_core.dataset import DataIndex

    collator = _collator(student, teacher, context) if student else None
    for file in files:
        with tempfile.TemporaryDirectory() as cache, spinner(f"reading {file.name}", quiet=as_json):
            index = DataIndex.build([file], field=field, cache_dir=Path(cache))
            form, kinds = next((form for _, form in index.conversations()), None), _kinds(index, collator)
        if as_json:
            typer.echo(json.dumps({"file": str(file), "records": len(index), "form": form, "kinds": kinds}))
            continue
        typer.echo(f"{file}: {len(index):,} records" + (f" of {form}, read as messages" if form else ""))
        for what, kind in kinds.items():
            typer.echo(f"  {kind['records']:>12,}  {what}" + (f"; first: {kind['first']}" if kind["records"] else ""))


def _collator(student: Path, teacher: Path | None, context: int) -> CrossTokenizerCollator:
    from xtoken_core.collate import CrossTokenizerCollator
    from xtoken_core.config.spec import padded_length
    from xtoken_services.common.run.defaults import TEACHER_CONTEXT
    from xtoken_services.common.tokenizers.loading import load_tokenizer

    return CrossTokenizerCollator(
        student_tokenizer=load_tokenizer(student, "student"),
        teacher_tokenizer=load_tokenizer(teacher, "teacher") if teacher else None,
        aligner=None,
        ctx_length_student=context,
        ctx_length_teacher=padded_length(int(context * TEACHER_CONTEXT)),
    )


def _kinds(index: DataIndex, collator: CrossTokenizerCollator | None) -> dict[str, dict[str, Any]]:
    """Return for what becomes of records how many do and where the first one is, those that are skipped last."""
    from xtoken_core import schema
    from xtoken_core.dataset import BadRecord

    kinds: dict[str, dict[str, Any]] = {what: {"records": 0, "first": None} for what in (USED, CUT)}
    reasons: dict[str, str] = {}

    def count(what: str, number: int) -> None:
        kind = kinds.setdefault(what, {"records": 0, "first": None})
        kind["records"], kind["first"] = kind["records"] + 1, kind["first"] or index.location(number)

    for begin in range(0, len(index), BATCH):
        records = index.read(range(begin, min(begin + BATCH, len(index))))
        readable = [record for record in records if not isinstance(record, BadRecord)]
        skipped = {record.number: record.reason for record in records if isinstance(record, BadRecord)}
        if collator is not None:
            rows = collator.rows([record.value for record in readable])
            skipped |= {readable[at].number: reason for at, reason in rows.refused.items()}
            cut = rows.columns[schema.TRUNCATED.name].values.cast("?") if rows.records else ()
            for at, is_cut in zip(rows.records, cut, strict=True):
                if is_cut:
                    count(CUT, readable[at].number)
        for record in records:
            reason = skipped.get(record.number)
            kind = USED if reason is None else f"skipped: {reasons.setdefault(PARTICULARS.sub('', reason), reason)}"
            count(kind, record.number)
    return kinds
