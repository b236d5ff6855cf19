"""Helpers for forms, and the run file of a tiny run, in a browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.browser.conftest import Plane
from xtoken_services.common.run.run_text import to_toml

WIDE, NARROW = 1280, 420
WHOLE_RUN_MS = 300_000
Open = Callable[..., Any]


def fill(page: Any, values: dict[str, str]) -> None:
    """Fill in fields by name, or by the setting that they write."""
    for name, value in values.items():
        field = page.locator(f"[name='{name}'], [data-setting='{name}']")
        if field.evaluate("element => element.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)


def run_file(plane: Plane, output: str, **changes: Any) -> str:
    """Return the run file of a tiny run on the CPU, with other tables in place of its own."""
    teacher = {"model": str(plane.assets.teacher), "context_length": 96, "projection": str(plane.assets.projection)}
    train = {"samples_per_step": 8, "micro_batch_tokens": 320, "learning_rate": 3e-3, "checkpoint_every": 10}
    document: dict[str, Any] = {
        "name": output,
        "output": output,
        "student": {"model": str(plane.assets.student), "context_length": 64},
        "teacher": [teacher],
        "data": {"path": str(plane.text)},
        "train": train | changes.pop("train", {}),
        "workers": {"device": "cpu", "collators": 1},
        "loss": {"mode": "p_kl", "ce_loss_scale": 0.1, "vocab_topk": 64},
    }
    return to_toml(document | changes)
