"""Greedy completions of the task's prompts by the teacher: answers to train on, and its own accuracy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.on_policy.real.methods import MAX_NEW_TOKENS
from experiments.on_policy.real.task import Files
from xtoken_core.atomic import atomic_write
from xtoken_core.tasks import accuracy_of, read_prompts

_BATCH = 128


def write_answers(teacher: Path, files: Files, *, device: str) -> dict[str, float]:
    """Write the teacher's answers to the training's prompts; return its accuracy by task.

    Args:
        teacher: Its directory.
        files: The task's.
        device: Where it generates.
    """
    measured = files.directory / "teacher.json"
    if not measured.is_file():
        model = AutoModelForCausalLM.from_pretrained(
            teacher, dtype=torch.float32 if device == "cpu" else torch.bfloat16
        )
        sides = model.to(device).eval(), AutoTokenizer.from_pretrained(teacher)
        prompts = [json.loads(line)["prompt"] for line in files.prompts.read_text(encoding="utf-8").splitlines()]
        records = [
            {"prompt": prompt, "completion": f"{line}\n"}
            for prompt, line in zip(prompts, _lines(*sides, prompts), strict=True)
            if line.strip()
        ]
        atomic_write(files.answers, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
        accuracy = {}
        for file in (files.validation, files.test):
            asked = read_prompts(file, "exact", 10_000)
            answers = _lines(*sides, [each.text for each in asked])
            accuracy[file.stem] = accuracy_of(asked, [[answer] for answer in answers])[0]
        atomic_write(measured, json.dumps(accuracy))
    result: dict[str, float] = json.loads(measured.read_text(encoding="utf-8"))
    return result


@torch.no_grad()
def _lines(model: Any, tokenizer: Any, prompts: Sequence[str]) -> Iterator[str]:
    """Yield the line that the model writes after each prompt."""
    tokenizer.padding_side = "left"
    for first in range(0, len(prompts), _BATCH):
        asked = tokenizer(prompts[first : first + _BATCH], return_tensors="pt", padding=True).to(model.device)
        made = model.generate(**asked, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        for row in made[:, asked["input_ids"].shape[1] :]:
            yield tokenizer.decode(row, skip_special_tokens=True).partition("\n")[0]
