"""Measurement of a model in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from experiments.digits import measures
from experiments.digits.settings import Scale
from experiments.digits.text import Texts
from xtoken_core.atomic import atomic_write


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
        result = measures.of_any_model(*measures.load(directory), scale, Texts(state / "text"))
        atomic_write(file, json.dumps(result))
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
