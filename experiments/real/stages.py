"""The stages that train and measure: text by data seed, runs, the teacher, and the result file."""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, write_result
from experiments.jobs import Job, finished, run_all
from experiments.real import controls, instructions
from experiments.real.methods import ANSWERED, CONDITIONS, EVAL_BYTES, METHODS, PATIENCE, Cell, Condition
from experiments.real.models import MissingSourceError
from experiments.real.plan import gib_of, has_models
from experiments.real.results import cell_of, merged, missing, read_result
from experiments.real.run_files import job, projection_file, shown_to_teacher, student_of, teachers_of
from xtoken_core.atomic import atomic_write
from xtoken_services.common.tokenizers.chat_templates import read_chat_template

_MEASURED = ("bits_per_byte", "teacher_bits_per_byte", "task_accuracy")
_METRICS = ("tokens_per_second", "memory_peak_bytes", "chunk_mass_t0")
_OF_COMPLETIONS = ("entropy", "finished", "completion_tokens")
_AT_ENDS = 8
"""Steps at either end of a run whose mean is told of a figure of its completions."""


def runs(
    state: Path,
    planned: Sequence[Cell],
    *,
    device: str,
    steps: int | None,
    patience: int = PATIENCE,
    partly: bool = False,
    **limits: Any,
) -> bool:
    """Make the runs that are not finished, in their order; return True if all are.

    Args:
        state: Directory of models, texts and runs.
        planned: The runs.
        device: `workers.device` of every run.
        steps: Optimiser steps of every run instead of its condition's.
        patience: Evaluations in a row without a better one after which a run ends; 0: it goes on to its last step.
        partly: Leave out the runs whose models are not there yet, and look again while others are made.
        **limits: How many runs at a time, where and until when, as `run_all` takes them.

    Raises:
        MissingSourceError: A model or text has not been made.
    """
    prepared: set[Cell] = set()

    def offered() -> list[Job]:
        able = [cell for cell in planned if not partly or has_models(state, cell)]
        if fresh := [cell for cell in able if cell not in prepared]:
            prepare(state, fresh)
            prepared.update(fresh)
        return [replace(job(cell, device=device, steps=steps, patience=patience), gib=gib_of(cell)) for cell in able]

    return run_all(state, offered, **limits)


def prepare(state: Path, planned: Sequence[Cell]) -> None:
    """Make the files that several of the planned runs read: projections, chain tables, text by data seed.

    Args:
        state: Directory of models, texts and runs.
        planned: The runs.

    Raises:
        MissingSourceError: A model or text has not been made.
    """
    for cell in planned:
        for file in (state / "models" / CONDITIONS[cell.condition].student, *(state / at for at in teachers_of(cell))):
            if not file.is_dir():
                stage = "models" if file.parent.name == "models" else "runs"
                raise MissingSourceError(f"there is no {file}: run the stage `{stage}` first")
        write_sample(state / "texts", cell)
    for name in dict.fromkeys(cell.condition for cell in planned):
        condition = CONDITIONS[name]
        if any(METHODS[cell.method].projects for cell in planned if cell.condition == name):
            _build_projection(state, condition)
        if any(METHODS[cell.method].reads_tables for cell in planned if cell.condition == name):
            _build_tables(state, condition.student, condition.teacher)
        if condition.second:
            _build_tables(state, condition.student, CONDITIONS[condition.second_teacher].student)
    for cell in planned:
        if CONDITIONS[cell.condition].source == instructions.SOURCE:
            atomic_write(state / "texts" / instructions.TEMPLATE_FILE, instructions.TEMPLATE)
        elif questions := shown_to_teacher(cell):
            own = read_chat_template(state / teachers_of(cell)[0])
            atomic_write(state / "texts" / questions.template, questions.template_after(own))


def make_controls(state: Path, planned: Sequence[Cell], *, device: str) -> None:
    """Make the teachers' answers that the planned runs need.

    Args:
        state: Directory of models, texts and runs.
        planned: The runs.
        device: Where models generate.

    Raises:
        MissingSourceError: A model has not been made.
    """
    for name in dict.fromkeys(cell.condition for cell in planned):
        if CONDITIONS[name].source in ANSWERED:
            controls.write_answers(state, name, device)


def write_sample(texts: Path, cell: Cell) -> None:
    """Write a condition's training texts: documents drawn by the data seed, up to its size in bytes each.

    Args:
        texts: Directory of the texts.
        cell: The run that needs it; runs of one condition and seed have it in common.

    Raises:
        MissingSourceError: The source has not been made.
    """
    for name, file in cell.texts.items():
        source, target = texts / f"{name}.train.jsonl", texts / file
        if not source.is_file():
            stage = "controls" if name in ANSWERED else "texts"
            raise MissingSourceError(f"there is no {source}: run the stage `{stage}` first")
        if target.is_file():
            continue
        lines = source.read_text(encoding="utf-8").splitlines()
        random.Random(cell.seed).shuffle(lines)
        kept, size = [], 0
        for line in lines:
            if size >= CONDITIONS[cell.condition].size:
                break
            kept.append(line)
            size += len(json.loads(line).get("text", line).encode())
        atomic_write(target, "".join(f"{line}\n" for line in kept))


def teachers(state: Path, names: Sequence[str], device: str, known: Path) -> None:
    """Measure each condition's teacher on the texts that its students are measured on, in bits per byte.

    Args:
        state: Directory of models and texts; the figures are written there.
        names: The conditions.
        device: Where the teachers run.
        known: A result file; a condition's own teacher that it has is not measured again.
    """
    measured_before = read_result(known)["teachers"]
    for name in names:
        condition = CONDITIONS[name]
        known_already = name in measured_before or condition.source in ANSWERED
        file = state / f"teacher-{name}.json"
        if not known_already and not file.is_file():
            measured = _measure_teacher(state, condition, condition.teacher, device)
            atomic_write(file, json.dumps(measured, indent=1) + "\n")


def collect(state: Path, planned: Sequence[Cell], out: Path) -> dict[str, Any]:
    """Add the finished runs to the result file; return its content.

    Args:
        state: Directory of the runs.
        planned: The runs; those that are not finished are listed as not run, of other data seeds than the first those
            with the weights and the rate that were best on it.
        out: The result file. Its runs and teachers that are not in `state` stay.

    Raises:
        OtherTextError: Its runs of a condition were made with other texts or models.
    """
    names = list(dict.fromkeys(cell.condition for cell in planned))
    measured = {name: state / f"teacher-{name}.json" for name in names}
    rows = finished_rows(state, planned)
    found = {
        "machine": {**machine(), "cpus": os.cpu_count()} if rows else {},
        "conditions": dict.fromkeys(names),
        "teachers": {name: json.loads(file.read_text()) for name, file in measured.items() if file.is_file()},
        "runs": rows,
        "not_run": [vars(cell) for cell in missing(rows, planned)],
    }
    result = merged(read_result(out), found)
    write_result(out, result)
    return result


def finished_rows(state: Path, planned: Iterable[Cell]) -> list[dict[str, Any]]:
    """Return the rows of the planned runs that have finished in this directory.

    Args:
        state: Directory of the runs.
        planned: The runs.
    """
    rows = [{**vars(cell), **_run_record(state / "runs" / cell.name)} for cell in planned if finished(state, cell.name)]
    for row in rows:
        if CONDITIONS[row["condition"]].follows:
            for evaluation, model in zip((row["curve"][0], row["curve"][-1]), scored_models(cell_of(row)), strict=True):
                evaluation |= controls.scored(state, model)
    return rows


def scored_models(cell: Cell) -> tuple[str, str]:
    """Return the directories of a run's student and of what it became, relative to the state's directory."""
    return student_of(cell), f"runs/{cell.name}/model"


def score(state: Path, planned: Sequence[Cell], *, until: float, device: str) -> bool:
    """Ask the students of runs for the held-out instructions as they come; return True if all have been asked.

    Args:
        state: Directory of models, texts and runs.
        planned: The runs.
        until: Time on the monotonic clock at which this ends.
        device: Where they generate.
    """
    some = [cell for cell in planned if CONDITIONS[cell.condition].follows]
    models = dict.fromkeys(model for cell in some for model in scored_models(cell))
    while True:
        done = [name for name in models if finished(state, Path(name).parts[1]) or name.startswith("models/")]
        controls.score(state, done, device)
        if all(controls.scored(state, name) for name in models):
            return True
        if time.monotonic() > until:
            return False
        time.sleep(1.0)


def _run_record(directory: Path) -> dict[str, Any]:
    """Return a run's evaluations, the medians of its metrics, and the step after which it ended early."""
    steps = [json.loads(line) for line in (directory / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    evals = [json.loads(line) for line in (directory / "eval.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = [{key: row[key] for key in row if key == "step" or key.startswith(_MEASURED)} for row in evals]
    metrics = {}
    for name in _METRICS:
        values = sorted(row[name] for row in steps if row.get(name) is not None)
        if values:
            metrics[name] = values[len(values) // 2]
    for name in _OF_COMPLETIONS:
        values = [row[name] for row in steps if row.get(name) is not None]
        if values:
            means = [statistics.fmean(values[n : n + _AT_ENDS]) for n in range(0, len(values), _AT_ENDS)]
            metrics[name] = [means[0], min(means), max(means), means[-1]]
    tokens = sum(row["tokens"] for row in steps)
    record = {"steps": len(steps), "tokens": tokens, "metrics": metrics, "curve": kept}
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    if "stopped_early" in summary:
        record["stopped_at"] = summary["steps"]
    settings = directory / "spec.json"
    if settings.is_file():
        spec = json.loads(settings.read_text(encoding="utf-8"))
        record["micro_batch_tokens"] = spec["train"]["micro_batch_tokens"]
        record["compiled"] = spec["student"]["compile"]
    return record


def _build_projection(state: Path, condition: Condition) -> None:
    """Build the projection of a pair, unless the file is there in this version."""
    from xtoken_core.projection import build_projection, write_projection
    from xtoken_core.projection.fingerprint import tokenizer_fingerprint
    from xtoken_core.projection.pair_cache import outdated
    from xtoken_services.common.tokenizers.loading import load_tokenizer

    file = state / projection_file(condition)
    student, teacher = (state / "models" / name for name in (condition.student, condition.teacher))
    prints = tokenizer_fingerprint(student), tokenizer_fingerprint(teacher)
    if not file.is_file() or outdated(file, "projection", prints) is not None:
        pair = load_tokenizer(student, "student"), load_tokenizer(teacher, "teacher")
        write_projection(build_projection(*pair), file)


def _build_tables(state: Path, *pair: str) -> None:
    """Build the chain tables where runs read them: runs that start together would each build them."""
    from xtoken_core.projection.fingerprint import tokenizer_fingerprint
    from xtoken_core.projection.pair_cache import PairCache
    from xtoken_services.common.tables.build_pair_file import build_pair_file

    student, teacher = (state / "models" / name for name in pair)
    prints = tokenizer_fingerprint(student), tokenizer_fingerprint(teacher)
    PairCache().file("chain", prints, lambda path: build_pair_file("chain", student, teacher, path))


def _measure_teacher(state: Path, condition: Condition, model_name: str, device: str) -> dict[str, float]:
    from xtoken_core.evaluation import evaluate

    model, tokenizer = controls.load(state / "models" / model_name, device)
    files = {"": f"{condition.source}.validation.jsonl"}
    files |= {f"_{source}.test": f"{source}.test.jsonl" for source in (condition.source, *condition.others)}
    measured = {}
    for name, file in files.items():
        lines = (state / "texts" / file).read_text(encoding="utf-8").splitlines()
        measured[f"bits_per_byte{name}"] = evaluate(
            model,
            tokenizer,
            (json.loads(line)["text"] for line in lines),
            context_length=condition.contexts[1],
            batch_tokens=4 * condition.contexts[1],
            device=model.device,
            max_bytes=EVAL_BYTES,
        ).bits_per_byte
    return measured
