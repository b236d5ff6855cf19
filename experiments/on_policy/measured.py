"""Measurement of a model in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from experiments.digits import measures
from experiments.digits.answers import exact_match
from experiments.digits.settings import Scale
from experiments.digits.text import SHOWN, Texts, held_out_problems, prompt_of
from xtoken_core.atomic import atomic_write

CONTEXTS = range(2 * SHOWN)
"""Numbers of solved problems before a question, over which `right_in_contexts` is the mean."""


def measured(state: Path, scale: Scale, name: str, directory: Path) -> dict[str, Any]:
    """Return right answers and bits per byte of a model, which is measured once.

    Args:
        state: Directory of models and text.
        scale: The experiment's size.
        name: Of the file that keeps the result.
        directory: The model's.
    """
    torch.set_num_threads(1)
    file = state / "measured" / f"on-policy-{name}.json"
    if not file.is_file():
        file.parent.mkdir(exist_ok=True)
        model = measures.load(directory)
        result = measures.of_any_model(*model, scale, Texts(state / "text"))
        problems = [problem for some in held_out_problems(scale).values() for problem in some]
        right = [exact_match(*model, problems, [prompt_of(scale, each, n) for each in problems]) for n in CONTEXTS]
        result["right_in_contexts"] = sum(right) / len(right)
        atomic_write(file, json.dumps(result))
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
