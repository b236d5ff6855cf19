"""Write `docs/real-models.md` and its picture from the result file, the predictions and the template `page.md.j2`.

    python -m experiments.real.page [--check]

With `--check` nothing is written; the exit status is 1 if a file is out of date.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.pages import render, write
from experiments.real import methods, overview, predictions, speed, summary

ROOT = Path(__file__).parents[2]
RESULT = Path(__file__).parent / "results" / "real.json"
PAGE = ROOT / "docs" / "real-models.md"
PICTURE = ROOT / "docs" / "img" / "evidence-real.svg"
TEMPLATE = Path(__file__).parent / "page.md.j2"


def rendered() -> dict[Path, str]:
    """Return every generated file with its text."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    return {PAGE: page(result), PICTURE: overview.picture(result)}


def page(result: dict[str, Any]) -> str:
    """Return the page's text.

    Args:
        result: Content of the result file.
    """
    titles = methods.TITLES
    found = summary.outcomes(result)
    conditions = [_entry(result, name, found) for name in result["conditions"] if summary.table(result, name)]
    compared = [entry for entry in conditions if {"chain", "ce"} <= set(entry["chosen"]) and not entry.get("tasks")]
    swept = overview.with_sweeps(result)
    found_swept = summary.outcomes(swept)
    at_their_best = [_entry(swept, entry["name"], found_swept) for entry in compared]
    passed = [
        entry
        for entry in at_their_best
        if entry["teacher"].get(f"bits_per_byte_{entry['own']}", 0.0) > entry["chosen"]["ce"].test
    ]
    waiting = Counter(titles[cell["method"]] for cell in result["not_run"] if cell["seed"] == methods.SEEDS[0])
    other_seeds = Counter(titles[cell["method"]] for cell in result["not_run"] if cell["seed"] != methods.SEEDS[0])
    return render(
        TEMPLATE,
        machine=result["machine"],
        conditions=conditions,
        compared=compared,
        overview=overview.table(result),
        worse=overview.worse(result),
        other_rates=overview.other_rates(result),
        fitted=overview.fitted_rates(result),
        past=overview.past_the_best(result),
        passed=[(overview.name_of(result["conditions"][entry["name"]]), *_gains(entry["chosen"])) for entry in passed],
        transfers=sum(_transfers(entry["chosen"], f"{entry['others'][0]}.test") for entry in compared),
        predictions="\n".join(predictions.compare(result)),
        waiting=dict(waiting),
        other_seeds=dict(other_seeds),
        missing=[name for name in methods.CONDITIONS if name not in {condition["name"] for condition in conditions}],
        untried=[titles[name] for name in methods.METHODS if name not in {run["method"] for run in result["runs"]}],
        pair=(methods.SMOLLM2, methods.GEMMA3),
        runs=len(result["runs"]),
        ended=sum("stopped_at" in run for run in result["runs"]),
        compiled=sum(run.get("compiled", False) for run in result["runs"]),
        micro_batch=methods.MICRO_BATCH_TOKENS,
        weights=methods.WEIGHTS,
        sweeps={*methods.SWEEPS, *methods.SWEEPS.values()},
        samples=methods.SAMPLES_PER_STEP,
        speed=_speed(),
    )


def _speed() -> dict[str, Any]:
    """Return the measured steps and their rows as the template shows them; empty if none was measured."""
    if not speed.RESULT.is_file():
        return {}
    result = json.loads(speed.RESULT.read_text(encoding="utf-8"))
    return {**result, "rows": speed.shown(result), "spread": speed.forward_spread(result)}


def _entry(result: dict[str, Any], name: str, found: list[summary.Outcome]) -> dict[str, Any]:
    """Return the template's values of a condition."""
    titles, condition = methods.TITLES, result["conditions"][name]
    best = summary.chosen(summary.as_shipped(found), methods.SEEDS[0])
    chosen = [row for row in summary.table(result, name) if best.get((name, row.method)) == row.weight]
    return {
        "name": name,
        **condition,
        "table": summary.markdown(result, name, titles),
        "accuracies": summary.accuracies(result, name, titles),
        "untrained": [titles[method] for method in summary.untrained(found, name)],
        "partial": [(titles[row.method], row) for row in summary.partial_sweeps(result, name)],
        "chosen": {row.method: row for row in chosen},
        "steps_best": {row.method: _best(found, name, row.method, row.weight) for row in chosen},
        "swept": methods.CONDITIONS[name].rates,
        "own": f"{condition['source']}.test",
        "teacher_name": condition["teacher"],
        "teacher": result["teachers"].get(name, {}),
        "same": result["teachers"].get(f"{name}-same", {}),
        "rates": sorted({outcome.rate for outcome in found if outcome.condition == name}),
    }


def _gains(chosen: dict[str, summary.Row]) -> list[float | None]:
    """Return the gains of chain with one weight and of the default; None for one that has not run."""
    rows = [chosen.get(name) for name in (summary.CHAIN, summary.DEFAULT)]
    return [row.gain if row else None for row in rows]


def _transfers(chosen: dict[str, summary.Row], text: str) -> bool:
    return chosen["chain"].others[text] < chosen["ce"].others[text]


def _best(found: list[summary.Outcome], condition: str, method: str, weight: str) -> str:
    group = [o for o in found if (o.condition, o.method, o.weight) == (condition, method, weight)]
    return ", ".join(f"{outcome.rate:g} at step {outcome.step}" for outcome in sorted(group, key=lambda o: o.seed))


if __name__ == "__main__":
    raise SystemExit(write(rendered, __doc__))
