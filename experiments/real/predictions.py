"""Predictions beside the outcomes of the runs on real models."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.real.methods import SEEDS
from experiments.real.summary import Outcome, chosen, outcomes

FILE = Path(__file__).parent / "predictions.toml"


def compare(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield one row of a Markdown table per prediction.

    Args:
        result: The result file's content.
    """
    found = outcomes(result)
    for prediction in tomllib.loads(FILE.read_text(encoding="utf-8"))["prediction"]:
        values = differences(result, found, prediction)
        low, high = prediction.get("low"), prediction.get("high")
        bounds = " to ".join(f"{bound:+g}" for bound in (low, high) if bound is not None)
        limits = f"at most {bounds}" if low is None else f"at least {bounds}" if high is None else bounds
        if not values:
            yield f"| {prediction['condition']} | {prediction['says']} | {limits} | not run | |"
            continue
        mean = statistics.fmean(values)
        verdict = "as predicted" if holds(mean, low, high) else "**not**"
        outcome = f"{mean:+.3f} ({len(values)})"
        yield f"| {prediction['condition']} | {prediction['says']} | {limits} | {outcome} | {verdict} |"


def holds(value: float, low: float | None, high: float | None) -> bool:
    """Return whether a figure is in a range; None is no bound."""
    return (low is None or value >= low) and (high is None or value <= high)


def differences(result: Mapping[str, Any], found: list[Outcome], prediction: Mapping[str, Any]) -> list[float]:
    """Return a prediction's differences in bits per byte, one for each data seed that both methods have.

    Args:
        result: The result file's content.
        found: Its outcomes.
        prediction: `condition`, `method`, `less`, `text` if it is not the condition's own test set, and `tried` if
            it is about a method of which so many weights have been tried on the first data seed.
    """
    condition = prediction["condition"]
    text = prediction.get("text", f"{result['conditions'].get(condition, {}).get('source')}.test")
    seeds = [outcome.seed for outcome in found if outcome.condition == condition]
    weights = chosen(found, min(seeds, default=0))

    def by_seed(method: str) -> dict[int, float]:
        weight = weights.get((condition, method))
        return {
            outcome.seed: outcome.bits[text]
            for outcome in found
            if (outcome.condition, outcome.method, outcome.weight) == (condition, method, weight)
            and text in outcome.bits
        }

    tried = {o.weight for o in found if (o.condition, o.method, o.seed) == (condition, prediction["method"], SEEDS[0])}
    if len(tried) < prediction.get("tried", 0):
        return []
    one, other = by_seed(prediction["method"]), by_seed(prediction["less"])
    return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]
