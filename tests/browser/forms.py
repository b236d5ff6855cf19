"""Values and helpers for the form of a run in a browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.browser.conftest import Plane

WIDE, NARROW = 1280, 420
WHOLE_RUN_MS = 300_000
Open = Callable[..., Any]


def fill(page: Any, values: dict[str, str]) -> None:
    """Fill in fields by name, after opening the sections that they are in."""
    for name, value in values.items():
        field = page.locator(f"[name='{name}']")
        if not field.is_visible():
            field.locator("xpath=ancestor::details[1]/summary").click()
        if field.evaluate("element => element.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)


def settings(plane: Plane, output: str) -> dict[str, str]:
    """Return the form values of a tiny run on the CPU."""
    return {
        "name": output, "output": output,
        "student.model": str(plane.assets.student), "student.context_length": "64",
        "teacher.0.model": str(plane.assets.teacher), "teacher.0.context_length": "96",
        "teacher.0.projection": str(plane.assets.projection),
        "data.path": str(plane.text), "train.samples_per_step": "8", "train.micro_batch_tokens": "320",
        "train.learning_rate": "3e-3", "train.checkpoint_every": "10", "workers.device": "cpu",
        "workers.collators": "1", "loss.mode": "p_kl", "loss.ce_loss_scale": "0.1", "loss.vocab_topk": "64",
    }  # fmt: skip
