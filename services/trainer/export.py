"""The finished student as a Hugging Face directory: safetensors, tokenizer, and a card that tells its origin."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from services.trainer.checkpoint import sync_directory
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import OutputError


def export_model(directory: Path, model: PreTrainedModel, tokenizer: Any, run: ResolvedRun, card: str) -> None:
    """Write the model whole or not at all.

    Raises:
        OutputError: It cannot be written; what was there stays.
    """
    scratch = directory.with_name(f".{directory.name}.tmp")
    old = directory.with_name(f".{directory.name}.old")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        model.save_pretrained(scratch, safe_serialization=True)
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


def model_card(run: ResolvedRun, summary: dict[str, Any], evaluation: dict[str, Any] | None) -> str:
    """What was distilled from what, on which data, with which loss, and what came out."""
    spec = run.spec
    teachers = "\n".join(f"- teacher: `{t.model}`, projection `{t.projection}`" for t in spec.teacher)
    held_out = f"{evaluation['bits_per_byte']:.4f} bits per byte on held-out text" if evaluation else "not evaluated"
    return f"""---
library_name: transformers
tags: [distillation, xtoken]
---

# {spec.name}

A student distilled by xtoken from a teacher with another tokenizer.

- student: `{spec.student.model}`
{teachers}
- data: {", ".join(f"`{p}`" for p in spec.data.paths)}, {run.records} records, {spec.data.epochs} epochs
- loss: {spec.loss.mode}; settings below
- steps: {summary["steps"]} of {spec.train.samples_per_step} samples, {summary["tokens"]} tokens
- result: {held_out}

```json
{json.dumps({"loss": spec.loss.model_dump(), "train": spec.train.model_dump()}, indent=2)}
```
"""
