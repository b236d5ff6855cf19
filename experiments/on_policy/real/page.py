"""Tables of the task on pretrained models, and the run file of its on-policy runs, for `docs/on_policy.md`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.digits.predictions import holds
from experiments.on_policy.real.methods import METHODS, SIZES, Cell, job
from experiments.on_policy.tables import bounds_of, plural, row_of, spread

PREDICTIONS = Path(__file__).with_name("predictions.toml")
HEADS = ("test, best step", "test, last step", "validation, last step")
COLUMNS = ("completion_tokens", "finished", "entropy", "data_wait", "teacher_wait", "rollout_wait")
FULL = SIZES["full"]
ALONE, TEACHER = "alone", "teacher"

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""A method's runs at its best learning rate, by method."""


def render(results: Mapping[str, Mapping[str, Any] | None]) -> str:
    """Return the tables at each size, by its name; a line for a size without a result."""
    parts = []
    for name, result in results.items():
        parts.append(f"The {name} size has not been run." if result is None else render_size(result))
    return "\n\n".join(parts)


def render_size(result: Mapping[str, Any]) -> str:
    """Return the tables at one size."""
    runs, size = chosen(result["runs"]), result["size"]
    machine = ", ".join(result["machine"]["gpus"]) or f"{result['machine']['cpus']} CPU cores shared with other work"
    own = ", ".join(f"`rollout.{name} = {json.dumps(value)}`" for name, value in result["rollout"].items())
    head = (
        f"The {size['name']} size: {size['steps']} steps of {size['samples']} prompts, learning rate "
        f"{', '.join(f'{rate:g}' for rate in size['rates'])}, {plural(len(size['seeds']), 'seed')}, "
        f"{size['test']} prompts of the test; {machine}. A completion is right if its line is the "
        "infinitive; the likeliest token is taken." + (f" These runs have {own} too." if own else "")
    )
    return "\n".join([head, "", *_accuracy(result, runs), "", *_notes(result, runs), "", *_predictions(result, runs)])


def render_file() -> str:
    """Return the run file of an on-policy run as a block."""
    return f"```toml\n{job(Cell('on_policy', FULL.rates[0], FULL.seeds[0]), FULL).file.strip()}\n```"


def chosen(runs: Sequence[Mapping[str, Any]]) -> Runs:
    """Return each method's runs at the learning rate that was best on validation with the first seed."""
    found = {}
    for name in METHODS:
        own = [run for run in runs if run["method"] == name]
        first = [run for run in own if run["seed"] == FULL.seeds[0]]
        best = max(first, key=lambda run: (run["curve"][-1]["validation"], run["rate"]), default=None)
        found[name] = [run for run in own if best is not None and run["rate"] == best["rate"]]
    return found


def best_step(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the evaluation of a run that was best on validation, the first of several."""
    best: Mapping[str, Any] = max(run["curve"], key=lambda row: row["validation"])
    return best


def _accuracy(result: Mapping[str, Any], runs: Runs) -> Iterator[str]:
    heads = ("", "seeds", "learning rate", *HEADS, "student tokens", *COLUMNS)
    yield from (row_of(heads), "|---" * len(heads) + "|")
    filler = [""] * (1 + len(COLUMNS))
    for name, measured in (("teacher", result["teacher"]), ("student alone", _alone(result))):
        cells = [f"{measured[split]:.1%}" for split in ("test", "validation")]
        yield row_of([name, "", "", cells[0], *cells, *filler])
    for name, own in runs.items():
        if not own:
            yield row_of([METHODS[name].title, "0", "not complete", "", "", "", *filler])
            continue
        cells = [METHODS[name].title, str(len(own)), f"{own[0]['rate']:g}"]
        cells.append(spread([best_step(run)["test"] for run in own]))
        cells += [spread([run["curve"][-1][split] for run in own]) for split in ("test", "validation")]
        cells.append(f"{fmean(run['tokens'] for run in own):,.0f}")
        for column in COLUMNS:
            values = [run["means"][column] for run in own if run["means"][column] is not None]
            cells.append(f"{fmean(values):.2f}" if values else "")
        yield row_of(cells)


def _alone(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the accuracy of the student before its first step, the same in every run."""
    first: Mapping[str, Any] = result["runs"][0]["curve"][0]
    return first


def _notes(result: Mapping[str, Any], runs: Runs) -> Iterator[str]:
    """Yield how steps are chosen, how exact the figures are, and two comparisons by seed and step."""
    size = result["size"]
    yield (
        f"The best step is that of a run's {size['evaluations']} evaluations with the most right answers on "
        "validation, the first of several. All seeds have the same first weights and the same prompts: "
        f"{size['validation']} of validation and {size['test']} of the test, where the standard error of a fraction "
        "of one half is "
        f"{50 / size['test'] ** 0.5:.1f} points."
    )
    one, other = ({run["seed"]: run for run in runs[name]} for name in ("on_policy", "off_policy"))
    both = sorted(one.keys() & other.keys())
    if both:
        best = ", ".join(f"{100 * (best_step(one[s])['test'] - best_step(other[s])['test']):+.1f}" for s in both)
        last = ", ".join(f"{100 * (_last(one[s]) - _last(other[s])):+.1f}" for s in both)
        yield f"On-policy less off-policy, by seed: {best} points at the best step, {last} at the last."
    if curves := [run["curve"] for run in runs["supervised"]]:
        means = [f"{fmean(row['validation'] for row in rows):.1%}" for rows in zip(*curves, strict=True)]
        steps = ", ".join(str(row["step"]) for row in curves[0])
        yield f"Supervised training is right on validation after {steps} steps in {', '.join(means)}."


def _last(run: Mapping[str, Any]) -> float:
    value: float = run["curve"][-1]["test"]
    return value


def _predictions(result: Mapping[str, Any], runs: Runs) -> Iterator[str]:
    """Yield the predictions; one holds if it does at the best and at the last step."""
    fixed = {ALONE: [(_alone(result)["test"],) * 2], TEACHER: [(result["teacher"]["test"],) * 2]}
    values = fixed | {name: [(best_step(run)["test"], _last(run)) for run in own] for name, own in runs.items()}
    yield from (row_of(("prediction", "predicted", "best step", "last step", "")), "|---" * 5 + "|")
    for prediction in tomllib.loads(PREDICTIONS.read_text(encoding="utf-8"))["prediction"]:
        low, high = prediction.get("low"), prediction.get("high")
        one, other = values[prediction["method"]], values[prediction["less"]]
        if not one or not other:
            yield row_of([prediction["says"], bounds_of(low, high), "not run", "", ""])
            continue
        means = [fmean(a) - fmean(b) for a, b in zip(zip(*one, strict=True), zip(*other, strict=True), strict=True)]
        verdict = "as predicted" if all(holds(mean, low, high) for mean in means) else "**not**"
        seeds = plural(max(len(one), len(other)), "seed")
        cells = [f"{mean:+.3f}" for mean in means]
        yield row_of([prediction["says"], bounds_of(low, high), cells[0], f"{cells[1]} ({seeds})", verdict])
