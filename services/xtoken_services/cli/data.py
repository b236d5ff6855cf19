"""`xtoken data`: what a run would make of a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtoken_core.errors import ConfigError, InputError
from xtoken_services.cli.options import JsonOption, SetOption
from xtoken_services.common.processes.progress import spinner

if TYPE_CHECKING:
    from xtoken_core.collate_generated import CompletionCollator
    from xtoken_core.config.spec import RunSpec
    from xtoken_core.dataset import DataIndex, Record

data_app = typer.Typer(name="data", help="Look at the text of a run.", no_args_is_help=True)
BATCH = 64
USED, CUT, DIVIDED = "used", "cut, of those used", "divided, of those used"
WEIGHED = "with a loss_multiplier, read by the Trainer integration alone: a run weighs all records alike"
PROMPTS = "prompts without an answer, used with [rollout], else skipped"
AS_TEXT = "used as text alone, of those used"
PARTICULARS = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")
"""What differs between two reasons of one kind."""
NO_FIELD, MOST_REASONS = "no field", 20
"""Beginning of the reasons that are counted by the fields that a record has, up to so many reasons."""


@data_app.callback()
def data() -> None:
    """Look at the text of a run."""


@data_app.command()
def check(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILES...", help="Files that a run reads.", show_default="the run's")
    ] = None,
    run: Annotated[Path | None, typer.Option("--run", metavar="RUN.toml", help="Take all settings from it.")] = None,
    student: Annotated[Path | None, typer.Option("--student", help="Tokenize as a run does: its directory.")] = None,
    teacher: Annotated[Path | None, typer.Option("--teacher", help="The teacher's, with --student.")] = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count the records that a run would use, cut at the contexts or skip and why, with the first of each kind.

    Without models records are only read, which finds neither those that are cut nor those that a tokenizer or a chat
    template cannot take. --set takes any setting without a run file too: student.chat_template=FILE, data.field=NAME.
    """
    import tempfile

    from xtoken_core.config.spec import read_run_file
    from xtoken_core.dataset import DataIndex
    from xtoken_services.common.run.defaults import expanded, fill_run_defaults

    if not (files or run):
        raise ConfigError("name the files to check, or a run file by --run")
    with tempfile.TemporaryDirectory() as scratch:
        document = expanded(read_run_file(run) if run else {"student": ".", "output": scratch})
        if files:
            kept = document["data"] if isinstance(document.get("data"), dict) else {}
            document["data"] = {**kept, "path": [str(file.absolute()) for file in files]}
            document["data"].pop("sources", None)
        if isinstance(rollout := document.get("rollout"), dict):
            rollout.pop("stop_when_worse", None)  # it goes by the tasks of an evaluation
        given = {"student": student, "teacher": teacher}
        models = [f"{name}.model={json.dumps(str(path.absolute()))}" for name, path in given.items() if path]
        base, source = run.resolve().parent if run else Path.cwd(), str(run or "the check")
        changes = [*models, *(settings or ())]
        spec, _ = fill_run_defaults(document | {"eval": "none"}, base, source=source, settings=changes)
        if (run or student) and not as_json:
            typer.echo("loading the tokenizers: some seconds, more for large vocabularies", err=True)
        collator = _collator(spec) if run or student else None
        used = 0
        for file, field in ((file, text.field or spec.data.field) for text in spec.data.texts for file in text.paths):
            with spinner(f"reading {file.name}", quiet=as_json):
                index = DataIndex.build([file], field=field, cache_dir=Path(scratch))
                form = next((form for _, form in index.conversations()), None)
                kinds = _kinds(index, collator, spec)
            _print_kinds(file, len(index), form, kinds, as_json=as_json)
            # Without a run file nothing is known of [rollout].
            used += kinds[USED]["records"] + (PROMPTS in kinds and (run is None or spec.rollout is not None))
    if not used:
        raise InputError("no record can be used: the lines above say why")


def _print_kinds(file: Path, records: int, form: str | None, kinds: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"file": str(file), "records": records, "form": form, "kinds": kinds}))
        return
    typer.echo(f"{file}: {records:,} record{'s' * (records != 1)}" + (f" of {form}, read as messages" if form else ""))
    for what, kind in kinds.items():
        typer.echo(f"  {kind['records']:>12,}  {what}" + (f"; first: {kind['first']}" if kind["records"] else ""))


def _collator(spec: RunSpec) -> CompletionCollator:
    from xtoken_core.collate_generated import CompletionCollator
    from xtoken_services.common.run.resolve import prompt_of
    from xtoken_services.common.text.collation import collator_with
    from xtoken_services.common.tokenizers.loading import tokenizer_of

    named = [("student", spec.student), *((spec.teacher_name(n), teacher) for n, teacher in enumerate(spec.teacher))]
    student, *teachers = (tokenizer_of(model, name) for name, model in named)
    prompts = [prompt_of(name, model) for name, model in named[1:]]
    return collator_with(CompletionCollator, spec, student, teachers, prompts)


def _kinds(index: DataIndex, collator: CompletionCollator | None, spec: RunSpec) -> dict[str, dict[str, Any]]:
    """Return for what becomes of records how many do and where the first one is, those that are skipped last."""
    from xtoken_core import schema
    from xtoken_core.dataset import BadRecord
    from xtoken_core.dataset.records import HAS_WEIGHT

    kinds: dict[str, dict[str, Any]] = {what: {"records": 0, "first": None} for what in (USED, CUT)}
    reasons: dict[str, str] = {}

    def count(what: str, number: int, reason: str | None = None) -> None:
        if reason is not None:
            by_names = reason.startswith(NO_FIELD) and len(reasons) < MOST_REASONS
            what = f"{what}: {reasons.setdefault(reason if by_names else PARTICULARS.sub('', reason), reason)}"
        kind = kinds.setdefault(what, {"records": 0, "first": None})
        kind["records"], kind["first"] = kind["records"] + 1, kind["first"] or index.location(number)

    for begin in range(0, len(index), BATCH):
        records = index.read(range(begin, min(begin + BATCH, len(index))))
        readable = [record for record in records if not isinstance(record, BadRecord)]
        skipped = {record.number: record.reason for record in records if isinstance(record, BadRecord)}
        chats = [record for record in readable if "messages" in record.value and spec.data.train_on != "all"]
        prompts = {one.number for one in chats if all(each["role"] != "assistant" for each in one.value["messages"])}
        if collator is not None:
            from xtoken_core.tokenizing import NO_ANSWER  # which loads torch

            rows = collator.rows([record.value for record in readable])
            skipped |= {readable[at].number: reason for at, reason in rows.refused.items()}
            prompts = {number for number in prompts if skipped.get(number) == NO_ANSWER}
            cut = rows.columns[schema.TRUNCATED.name].values.cast("?") if rows.records else ()
            for at, is_cut in zip(rows.records, cut, strict=True):
                if is_cut and spec.has_text:
                    is_divided = spec.data.long == "split" and "text" in readable[at].value
                    count(DIVIDED if is_divided else CUT, readable[at].number)
            for number, reason in _without_room(readable, collator, spec):
                if number in prompts or not spec.has_text:
                    skipped[number] = reason
                    prompts.discard(number)
                elif number not in skipped:
                    count(AS_TEXT, number, reason)
        for record in records:
            if not isinstance(record, BadRecord) and HAS_WEIGHT in record.value:
                count(WEIGHED, record.number)
            kind = PROMPTS if record.number in prompts else "skipped" if record.number in skipped else USED
            count(kind, record.number, skipped.get(record.number) if kind == "skipped" else None)
    return kinds


def _without_room(records: Sequence[Record], collator: CompletionCollator, spec: RunSpec) -> Iterator[tuple[int, str]]:
    """Yield the numbers of records that rollout workers refuse as prompts, with the reason."""
    if spec.rollout is None:
        return
    from xtoken_core.tokenizing import ConversationError, UnspellableError
    from xtoken_services.common.text.prompts import encoded_prompt

    for record in records:
        try:
            encoded_prompt(record.value, collator.student, spec)
        except (ConversationError, UnspellableError) as error:
            yield record.number, str(error)
