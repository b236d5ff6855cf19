"""Export of a student as a Hugging Face directory: safetensors, tokenizer and model card."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedModel

from xtoken_core.atomic import atomic_rename, sync_tree
from xtoken_core.config.loss import ADAPTIVE, PAIR_KINDS, PAIR_NAMES
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import StudentSpec
from xtoken_core.errors import OutputError
from xtoken_core.regular_files import MIB, json_object_or_empty, read_regular
from xtoken_core.tokenizing import TextTokenizer
from xtoken_services.common.files.jsonl import lines_before_step
from xtoken_services.common.generation.vocabulary import end_tokens
from xtoken_services.common.run.loss_words import loss_in_words
from xtoken_services.common.run.metric_lines import finite
from xtoken_services.trainer.checkpoint import Cursor
from xtoken_services.trainer.kd_weight import why_constant

EVAL_METRICS = (
    ("bits_per_byte", "bits per byte"),
    ("standard_error", "its standard error over documents"),
    ("teacher_bits_per_byte", "bits per byte of the teacher"),
    ("loss", "cross-entropy, nats per token"),
    ("next_token_accuracy", "next-token accuracy"),
)
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
SNAPSHOT = re.compile(r".*/(?:models|datasets)--(?P<repo>[^/]+)/snapshots/[0-9a-f]{40}(/.*)?")
LICENSE = re.compile(r"^license(?:_name)?:\s*[\"']?([\w.+-]{1,64})[\"']?\s*$", re.MULTILINE)
OTHER = "other"
"""Licence of a card that names it by `license_name`."""


def export_student(
    directory: Path,
    run: ResolvedRun,
    cursor: Cursor,
    student: tuple[PreTrainedModel, Any],
    tokenizer: Any,
    *,
    output: Path,
    replaces: bool = True,
) -> None:
    """Write a student, adapters merged if so configured, with a model card of the metrics up to its step.

    Args:
        directory: Target.
        run: The run.
        cursor: Position of the run.
        student: The model and peft's view of it, as `Student.full_model` gives them.
        tokenizer: The student's.
        output: The run's directory with its metrics.
        replaces: As for `export_model`.

    Raises:
        OutputError: It cannot be written; what was there stays.
    """
    (model, adapted), lora = student, run.spec.train.lora
    if adapted is not None and lora is not None and lora.export == "merged":
        model, adapted = adapted.merge_and_unload(), None
    if adapted is None:
        _cast(model, run.spec.student)
    ends, turn_end = end_tokens(model), TextTokenizer(tokenizer, "student").turn_end
    ends = [end for end in (ends if isinstance(ends, list) else [ends]) if end is not None]
    if turn_end is not None and turn_end not in ends and model.generation_config is not None:
        model.generation_config.eos_token_id = [*ends, turn_end]  # a borrowed template: servers stop at these alone
    steps = deque(lines_before_step(output / "steps.jsonl", cursor.step), maxlen=1)
    evaluations = list(lines_before_step(output / "eval.jsonl", cursor.step + 1)) if run.spec.eval is not None else []
    card = model_card(run, position_counts(run, cursor), evaluations, steps[-1] if steps else None)
    export_model(directory, model, adapted, tokenizer, card, replaces=replaces)


def _cast(model: PreTrainedModel, student: StudentSpec) -> None:
    """Cast weights in place to the dtype of the export; those that must stay in float32 do."""
    config = json_object_or_empty(student.model / "config.json")  # it may be gone by the end of a run
    own = config.get("dtype", config.get("torch_dtype"))
    halved = own if own in ("bfloat16", "float16") and student.dtype == "float32" else student.dtype
    dtype: torch.dtype = getattr(torch, student.export_dtype or halved)
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    for name, parameter in model.named_parameters():
        if not kept & set(name.split(".")):
            parameter.data = parameter.data.to(dtype)


def position_counts(run: ResolvedRun, cursor: Cursor) -> dict[str, Any]:
    """Return the counts of positions up to a cursor: the content of `summary.json`."""
    return {
        "positions": run.positions,
        "trained": cursor.trained,
        "skipped": len(cursor.skipped),
        "dead": len(cursor.dead),
        "truncated": cursor.truncated,
        "steps": cursor.step,
        "updates": cursor.updates,
        "nonfinite_steps": cursor.nonfinite,
        "tokens": cursor.tokens,
        "skipped_reasons": cursor.skipped,
        "dead_reasons": cursor.dead,
    }


def export_model(
    directory: Path, model: PreTrainedModel, adapted: Any, tokenizer: Any, card: str, *, replaces: bool = True
) -> None:
    """Write the model atomically: into a temporary directory, with fsync, then renamed.

    Args:
        directory: Target.
        model: The student.
        adapted: peft's view of it, if only its adapters are wanted.
        tokenizer: The student's.
        card: The text of its `README.md`.
        replaces: Replace an existing directory; otherwise that is an error.

    Raises:
        OutputError: It cannot be written; what was there stays.
    """
    # Only a run's own trainer replaces, so one name is enough and a killed trainer's leftover is removed; exports by
    # hand may run side by side, each with a name of its own.
    scratch = directory.with_name(f".{directory.name}.{'' if replaces else f'{os.getpid()}.'}tmp")
    old = directory.with_name(f".{directory.name}.old")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        (adapted or model).save_pretrained(scratch, safe_serialization=True)
        tokenizer.save_pretrained(scratch)
        (scratch / "README.md").write_text(card, encoding="utf-8")
        for path in scratch.iterdir():
            path.chmod((scratch / "README.md").stat().st_mode)  # safetensors makes its files private
        sync_tree(scratch)
        if replaces:
            shutil.rmtree(old, ignore_errors=True)
            if directory.exists():
                directory.rename(old)
        atomic_rename(scratch, directory)
        if replaces:
            shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"cannot write the model {directory}: {reason}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def model_card(
    run: ResolvedRun,
    summary: Mapping[str, Any],
    evaluations: Sequence[Mapping[str, Any]],
    last_step: Mapping[str, Any] | None,
) -> str:
    """Return the model card: student, teachers, data, loss, metrics.

    Args:
        run: The run.
        summary: Counts of positions up to the step, as in `summary.json`.
        evaluations: Lines of `eval.jsonl` up to the step.
        last_step: Last line of `steps.jsonl` before the step.
    """
    spec = run.spec
    settings = spec.model_dump(mode="json", include={"seed", "loss", "train"})
    partly = f" Taken after {summary['steps']} of the run's {run.steps} steps." if summary["steps"] < run.steps else ""
    licence_text, licence_line = licences(run)
    return f"""---
library_name: {"peft" if spec.train.lora and spec.train.lora.export == "adapter" else "transformers"}
base_model: {json.dumps(base_model(spec.student.model), ensure_ascii=False)}
{licence_line}pipeline_tag: text-generation
tags: [{"distillation, " if spec.teacher else ""}xtoken]
---

# {spec.name}

`{base_model(spec.student.model)}`, {_trained_how(run)}.{partly}

## Origin

{_origin(run, evaluations)}

## Licences

{licence_text}

## Training

{_training(spec.train.samples_per_step, summary)}
{_last_step(last_step)}
## Held-out text

{_held_out(run, evaluations)}

## Settings

```json
{json.dumps(settings, indent=2)}
```

xtoken {_version()}, torch {torch.__version__}, transformers {transformers.__version__}.
"""


def _origin(run: ResolvedRun, evaluations: Sequence[Mapping[str, Any]]) -> str:
    spec, lora = run.spec, run.spec.train.lora
    adapters = f", adapters of rank {lora.rank} ({lora.export})" if lora else ""
    return f"""- student: `{base_model(spec.student.model)}`, {spec.student.dtype}{adapters}
{_teachers(run)}- data: {text_names(spec.data.paths)}: {run.records} records, of which the run \
goes through {run.positions} (`data.epochs` = {spec.data.epochs}), \
fingerprint `{run.data_fingerprint[:16]}`
- loss: {loss_in_words(spec.model_dump(), run.same_tokenizer)}{_course(run, evaluations)}"""


def _course(run: ResolvedRun, evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Return the temperature, and how the weight of the divergence changes; empty without a teacher."""
    if not run.spec.teacher:
        return ""
    text = f", at temperature {run.spec.loss.temperature:g}"
    if run.spec.loss.kl_loss_weight_end == ADAPTIVE:
        why = why_constant(finite(evaluations[-1])) if evaluations else ""
        where = "the text" if run.spec.eval is None else "held-out text"
        less = f"counts less once the student comes near the teacher on {where}"
        text += "; the divergence " + (f"kept its weight {run.spec.loss.kl_loss_weight:g}: {why}" if why else less)
    return text


def _training(samples_per_step: int, summary: Mapping[str, Any]) -> str:
    trained = f"{summary['trained']}, {summary['skipped']}, {summary['dead']}"
    rows = {
        "optimiser steps": f"{summary['steps']} of {samples_per_step} samples",
        "steps skipped: loss or gradient not finite": summary["nonfinite_steps"],
        "student tokens": summary["tokens"],
        "samples trained, skipped, dead": trained,
        "documents cut at the context length": summary["truncated"],
    }
    return "\n".join(["| metric | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _version() -> str:
    with suppress(PackageNotFoundError):
        return version("xtoken")
    return "(not installed)"


def _trained_how(run: ResolvedRun) -> str:
    if not run.spec.teacher:
        return "trained by xtoken on text, without a teacher"
    return f"distilled by xtoken from {_teachers_in_words(run)}"


def _teachers_in_words(run: ResolvedRun) -> str:
    spec = run.spec
    names = " and ".join(f"`{base_model(teacher.model)}`" for teacher in spec.teacher)
    foreign = sum(not same for same in run.same_tokenizer)
    if not foreign:
        return names
    how_many = "" if foreign == len(spec.teacher) else "one of them " if foreign == 1 else f"{foreign} of them "
    return f"{names}, {how_many}with {'a tokenizer of its' if foreign == 1 else 'tokenizers of their'} own"


def _teachers(run: ResolvedRun) -> str:
    lines = []
    for number, (teacher, fingerprint) in enumerate(zip(run.spec.teacher, run.projection_fingerprints, strict=True)):
        file = run.pair_file(number)
        kind = PAIR_KINDS.get(run.spec.loss.mode_of(number))
        if file is None:
            how = "same tokenizer" if run.same_tokenizer[number] else "another tokenizer"
        elif file == teacher.projection or kind is None:
            how = f"projection `{file.name}` (`{fingerprint[:16]}`)"
        else:
            how = f"{PAIR_NAMES[kind]} built for this run (`{fingerprint[:16]}`)"
        weights = teacher.dtype + {None: "", "fp8": ", 8-bit weights", "nf4": ", 4-bit weights"}[teacher.quantized]
        lines.append(f"- teacher: `{base_model(teacher.model)}`, {weights}, weight {teacher.weight:g}, {how}")
    return "".join(f"{line}\n" for line in lines)


def _last_step(line: Mapping[str, Any] | None) -> str:
    line, names = line or {}, ("loss", "kl_loss", "kl_loss_scale", "ce_loss", "accuracy", "tokens_per_second", "mfu")
    return "".join(f"| {name} at the last step | {line[name]:.6g} |\n" for name in names if line.get(name) is not None)


def _held_out(run: ResolvedRun, evaluations: Sequence[Mapping[str, Any]]) -> str:
    if run.spec.eval is None or not evaluations:
        return "Not evaluated."
    first, last = evaluations[0], evaluations[-1]
    shown = (first, last) if first["step"] < last["step"] else (last,)
    also = [(f"bits_per_byte_{name}", f"bits per byte of {name}") for name in run.spec.eval.also_by_name]
    rows = [
        f"| {words} | {' | '.join(f'{row[name]:.4f}' for row in shown)} |"
        for name, words in (*EVAL_METRICS, *also)
        if all(row.get(name) is not None for row in shown)
    ]
    rows += _task_rows(run, shown)
    paths = (
        f"held back of {text_names(run.spec.data.paths)}" if run.spec.holds_back else text_names(run.spec.eval.paths)
    )
    heads = ["metric", *(f"after {row['step']} steps" for row in shown)]
    table = "\n".join([f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *rows])
    return f"{paths}: {last['documents']} documents, {last['bytes']} bytes.\n\n{table}"


def _task_rows(run: ResolvedRun, shown: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a row per task of the table of held-out results."""
    tasks = run.spec.eval.tasks if run.spec.eval is not None else None
    if tasks is None:
        return []
    how = "greedy" if not tasks.temperature else f"{tasks.samples} at temperature {tasks.temperature:g}"
    return [
        f"| task {name}: right of {shown[-1][f'task_prompts_{name}']} prompts ({how}) "
        f"| {' | '.join(f'{row[key]:.1%}' for row in shown)} |"
        for name in tasks.by_name
        if all(row.get(key := f"task_accuracy_{name}") is not None for row in shown)
    ]


def base_model(model: Path) -> str:
    """Return a model's name: its id on the Hub, as given or as the cache has it, or else its directory's name."""
    name = str(model)
    given = name if HUB_ID.fullmatch(name) and not model.exists() else None
    return given or hub_name(model) or model.absolute().name


def hub_name(path: Path) -> str | None:
    """Return the repository of a file or directory in the Hub's cache; None for any other path."""
    match = SNAPSHOT.fullmatch(str(path))
    return match["repo"].replace("--", "/", 1) if match else None


def text_names(paths: Sequence[Path]) -> str:
    """Return the names of files of text; of those of a data set on the Hub its id."""
    return ", ".join(f"`{name}`" for name in dict.fromkeys(hub_name(path) or path.name for path in paths))


def licence_of(model: Path) -> str | None:
    """Return the licence that a model's card or configuration names; None: neither does."""
    named: list[str] = []
    with suppress(OSError):
        parts = read_regular(model / "README.md", MIB).decode("utf-8", "replace").split("---", 2)
        named = LICENSE.findall(parts[1]) if len(parts) == 3 and not parts[0].strip() else []
    if not named:
        configured = json_object_or_empty(model / "config.json").get("license")
        named = [configured] if isinstance(configured, str) else []
    return next((name for name in named if name != OTHER), named[0] if named else None)


def licences(run: ResolvedRun) -> tuple[str, str]:
    """Return the card's section on licences, and the line of its header.

    The line is empty if the licences differ or one is unknown.
    """
    models = {"student": run.spec.student.model}
    models |= {run.spec.teacher_name(number): teacher.model for number, teacher in enumerate(run.spec.teacher)}
    named = {what: licence_of(model) for what, model in models.items()}
    lines = [
        f"- {what} `{base_model(models[what])}`: {licence or 'its files name none'}" for what, licence in named.items()
    ]
    text = "\n".join([*lines, "", "All of them apply to this model, and so does the licence of the text."])
    (only,) = set(named.values()) if len(set(named.values())) == 1 else (None,)
    return text, f"license: {json.dumps(only)}\n" if only else ""
