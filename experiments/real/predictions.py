"""Predictions beside the outcomes of the runs on real models."""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.real.methods import CONDITIONS, SEEDS
from experiments.real.plan import best_rate
from experiments.real.summary import TASK, VALIDATION, Outcome, chosen, outcomes

FILE = Path(__file__).parent / "predictions.toml"
PARTS = ("share", "steps", "accuracy")
"""Figures that are told in percent."""


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
        outcome = f"{mean:{'.1%' if prediction.get('figure') in PARTS else '+.3f'}} ({len(values)})"
        yield f"| {prediction['condition']} | {prediction['says']} | {limits} | {outcome} | {verdict} |"


def holds(value: float, low: float | None, high: float | None) -> bool:
    """Return whether a figure is in a range; None is no bound."""
    return (low is None or value >= low) and (high is None or value <= high)


def differences(result: Mapping[str, Any], found: list[Outcome], prediction: Mapping[str, Any]) -> list[float]:
    """Return a prediction's differences in bits per byte, one for each data seed that both methods have.

    Args:
        result: The result file's content.
        found: Its outcomes.
        prediction: `condition`, `method`, `less`, `text` if it is not the condition's own test set, `rate` if both
            methods are compared at one, and `tried` if it is about a method of which so many weights have been tried
            on the first data seed. What else it may have is described at `_figure`.
    """
    condition = prediction["condition"]
    text = prediction.get("text", f"{result['conditions'].get(condition, {}).get('source')}.test")
    if "rate" in prediction or "figure" in prediction:
        return _figures(result, found, prediction, text)
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


def _figures(result: Mapping[str, Any], found: list[Outcome], prediction: Mapping[str, Any], text: str) -> list[float]:
    """Return a prediction's figures of whole curves, one for each data seed."""
    others = [prediction["less"]] if isinstance(prediction["less"], str) else prediction["less"]
    curves = [_curves(result, found, prediction, method) for method in (prediction["method"], *others)]
    seeds = set.intersection(*(set(curve) for curve in curves))
    figures = (_figure(result, prediction, text, *(curve[seed] for curve in curves)) for seed in sorted(seeds))
    return [figure for figure in figures if figure is not None]


def _curves(
    result: Mapping[str, Any], found: list[Outcome], prediction: Mapping[str, Any], method: str
) -> dict[int, list[dict[str, float]]]:
    """Return a method's curve by data seed, at the prediction's rate or at the one that is best on validation."""
    condition = prediction["condition"]
    rates = {o.rate for o in found if (o.condition, o.method, o.seed) == (condition, method, SEEDS[0])}
    rate = prediction.get("rate", min(rates, default=None))
    if prediction.get("figure") == "accuracy" and "rate" not in prediction:
        rate = best_rate(result, condition, method)
    return {
        run["seed"]: run["curve"]
        for run in result["runs"]
        if (run["condition"], run["method"], run["rate"]) == (condition, method, rate)
    }


def _figure(
    result: Mapping[str, Any], prediction: Mapping[str, Any], text: str, *curves: list[dict[str, float]]
) -> float | None:
    """Return the figure of a prediction from whole curves; None if it is unknown.

    `less`, if it names none, is the method's bits per byte minus the fewest of the others', at the best step on
    validation or, with `last`, at the last one. `begun` is the method's minus its own before training. `share` is how
    much of the way from the other to the teacher the method covers. `teacher` is the method's minus the condition's
    teacher's. `steps` is the step at which it has what the other
    ends with, as a fraction of the other's steps. `accuracy` is the method's on the condition's task less the highest
    of the others, each at the rate that is best by it; less its own before training where there are none. `task` names
    another task.

    Args:
        result: The result file's content.
        prediction: The prediction.
        text: The test set.
        curves: Evaluations of the method, then of each of the others.
    """
    key = f"{VALIDATION}_{text}"
    ends = [curve[-1] if prediction.get("last") else min(curve, key=lambda row: row[VALIDATION]) for curve in curves]
    figure = prediction.get("figure", "less")
    if figure == "accuracy":
        key = f"{TASK}{prediction.get('task') or CONDITIONS[prediction['condition']].task}"
        right, *beside = (row.get(key) for row in ends)
        beside = beside or [curves[0][0].get(key)]
        return None if None in (right, *beside) else right - max(beside)
    own, *others = (row[key] for row in ends)
    if figure == "begun":
        return own - curves[0][0][key]
    teacher = result["teachers"].get(prediction["condition"], {}).get(key)
    if figure == "teacher":
        return None if teacher is None else own - teacher
    if figure == "share":
        return None if teacher is None else (others[0] - own) / (others[0] - teacher)
    if figure == "steps":
        last = curves[1][-1]
        reached = (row["step"] for row in curves[0] if row[VALIDATION] <= last[VALIDATION])
        return next(reached, math.inf) / last["step"]
    return own - min(others)
