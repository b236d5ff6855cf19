"""The finished student as a Hugging Face directory: safetensors, tokenizer, and a card that tells its origin."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from services.trainer.checkpoint import sync_directory
from xtoken_core.config.loss import LossConfig
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import OutputError

FIGURES = (
    ("bits_per_byte", "bits per byte"),
    ("loss", "cross-entropy, nats per token"),
    ("next_token_accuracy", "next-token accuracy"),
    ("held_out_loss", "the run's loss"),
    ("held_out_kl_loss", "divergence from the teachers"),
)


def export_model(directory: Path, model: PreTrainedModel, adapted: Any, tokenizer: Any, card: str) -> None:
    """Write the model whole or not at all.

    Args:
        directory: Where to; what is there is replaced.
        model: The student.
        adapted: peft's view of it, if only its adapters are wanted.
        tokenizer: The student's.
        card: The text of its `README.md`.

    Raises:
        OutputError: It cannot be written; what was there stays.
    """
    scratch = directory.with_name(f".{directory.name}.tmp")
    old = directory.with_name(f".{directory.name}.old")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        (adapted or model).save_pretrained(scratch, safe_serialization=True)
        tokenizer.save_pretrained(scratch)
        (scratch / "README.md").write_text(card, encoding="utf-8")
        sync_directory(scratch)
        shutil.rmtree(old, ignore_errors=True)
        if directory.exists():
            directory.rename(old)
        scratch.rename(directory)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise OutputError(f"cannot write the model {directory}: {error.strerror or error}") from error


def model_card(
    run: ResolvedRun,
    summary: Mapping[str, Any],
    evaluations: Sequence[Mapping[str, Any]],
    last_step: Mapping[str, Any] | None,
) -> str:
    """What was distilled from what, on which data, with which loss, and what came out.

    Args:
        run: The run.
        summary: The run's `summary.json`.
        evaluations: The lines of its `eval.jsonl`.
        last_step: The last line of its `steps.jsonl`.
    """
    spec = run.spec
    settings = {
        "seed": spec.seed,
        "loss": spec.loss.model_dump(mode="json"),
        "train": spec.train.model_dump(mode="json"),
    }
    adapters = f", adapters of rank {spec.train.lora.rank} ({spec.train.lora.export})" if spec.train.lora else ""
    return f"""---
library_name: {"peft" if spec.train.lora and spec.train.lora.export == "adapter" else "transformers"}
base_model: {spec.student.model}
pipeline_tag: text-generation
tags: [distillation, xtoken]
---

# {spec.name}

`{spec.student.model.name}`, distilled by xtoken from {_teachers_in_words(run)}.

## Origin

- student: `{spec.student.model}`, {spec.student.dtype}{adapters}
{_teachers(run)}
- data: {", ".join(f"`{path}`" for path in spec.data.paths)}: {run.records} records, of which the run \
goes through {run.positions} (`data.epochs` = {spec.data.epochs}), \
fingerprint `{run.data_fingerprint[:16]}`
- loss: {_loss_in_words(spec.loss, [spec.loss.mode_of(i) for i in range(len(spec.teacher))])}

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


def _training(samples_per_step: int, summary: Mapping[str, Any]) -> str:
    trained = f"{summary['trained']}, {summary['skipped']}, {summary['dead']}"
    rows = {
        "optimiser steps": f"{summary['steps']} of {samples_per_step} samples",
        "steps left out, for want of a finite gradient": summary["nonfinite_steps"],
        "student tokens": summary["tokens"],
        "samples trained, skipped, dead": trained,
        "documents cut at the context length": summary["truncated"],
    }
    return "\n".join(["| figure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _version() -> str:
    try:
        return version("xtoken")
    except PackageNotFoundError:
        return "(not installed)"


def _teachers_in_words(run: ResolvedRun) -> str:
    names = " and ".join(f"`{teacher.model.name}`" for teacher in run.spec.teacher)
    foreign = sum(not same for same in run.spec.same_tokenizer)
    return f"{names}, with a tokenizer of {'its' if len(run.spec.teacher) == 1 else 'their'} own" if foreign else names


def _teachers(run: ResolvedRun) -> str:
    lines = []
    for teacher, fingerprint in zip(run.spec.teacher, run.projection_fingerprints, strict=True):
        how = f"projection `{teacher.projection}` (`{fingerprint[:16]}`)" if teacher.projection else "same tokenizer"
        lines.append(f"- teacher: `{teacher.model}`, {teacher.dtype}, weight {teacher.weight:g}, {how}")
    return "\n".join(lines)


def _loss_in_words(loss: LossConfig, modes: Sequence[str]) -> str:
    scaled = "scaled to the cross-entropy" if loss.dynamic_loss_scaling else f"times {loss.kl_loss_weight:g}"
    ce = "" if loss.dynamic_loss_scaling else f" times {loss.ce_loss_scale:g}"
    return f"{', '.join(modes)} at temperature {loss.temperature:g} {scaled}, and cross-entropy{ce}"


def _last_step(line: Mapping[str, Any] | None) -> str:
    if line is None:
        return ""
    names = ("loss", "kl_loss", "ce_loss", "accuracy", "tokens_per_second", "mfu")
    return "".join(f"| {name} at the last step | {line[name]:.6g} |\n" for name in names if line.get(name) is not None)


def _held_out(run: ResolvedRun, evaluations: Sequence[Mapping[str, Any]]) -> str:
    if run.spec.eval is None or not evaluations:
        return "Not evaluated."
    first, last = evaluations[0], evaluations[-1]
    rows = [
        f"| {words} | {first[name]:.4f} | {last[name]:.4f} |"
        for name, words in FIGURES
        if first.get(name) is not None and last.get(name) is not None
    ]
    told = ", ".join(f"`{path}`" for path in run.spec.eval.paths)
    table = "\n".join(
        [f"| figure | after {first['step']} steps | after {last['step']} steps |", "|---|---|---|", *rows]
    )
    return f"{told}: {last['documents']} documents, {last['bytes']} bytes.\n\n{table}"
