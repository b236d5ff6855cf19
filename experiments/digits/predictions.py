"""Predictions beside the outcomes."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.digits.summary import Summary, number

FILE = Path(__file__).parent / "predictions.toml"
_ONE_SEED = "one seed"


def theory() -> str:
    """Return the reason for the prediction, as it was written down."""
    text: str = _read()["theory"]
    return text.strip()


def outcomes(summary: Summary) -> Iterator[str]:
    """Yield one row of a table per prediction."""
    for prediction in _read()["prediction"]:
        value, seeds = measured(summary, prediction)
        low, high = prediction.get("low"), prediction.get("high")
        if value is None:
            outcome, verdict = "not run", ""
        else:
            outcome = f"{value:.3f}" + (f" ({_ONE_SEED})" if seeds == 1 else "")
            verdict = "as predicted" if holds(value, low, high) else "**not**"
        yield f"| {prediction['says']} | {_range(low, high)} | {outcome} | {verdict} |"


def measured(summary: Summary, prediction: dict[str, Any]) -> tuple[float | None, int]:
    """Return the value that a prediction is about, and over how many seeds it is a mean (0: no seeds are involved)."""
    if "mass" in prediction:
        return summary.mass(**prediction["mass"]), 0
    path = prediction["measure"]
    if "teacher" in prediction:
        found = summary.teacher(prediction["teacher"])
        return (number(found[0], path) if found else None), 0
    if "less" in prediction:
        values = summary.difference(prediction["method"], prediction["less"], path)
        return (statistics.fmean(values) if values else None), len(values)
    return summary.mean(prediction["method"], path), len(summary.runs(prediction["method"]))


def holds(value: float, low: float | None, high: float | None) -> bool:
    """Return whether a figure is in a range; None is no bound."""
    return (low is None or value >= low) and (high is None or value <= high)


def _range(low: float | None, high: float | None) -> str:
    if low is None:
        return f"at most {high:g}"
    return f"at least {low:g}" if high is None else f"{low:g} to {high:g}"


def _read() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))
