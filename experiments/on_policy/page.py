"""Write the results into `docs/on_policy.md`: `python -m experiments.on_policy.page`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.worker_kills.rollouts import RESULT as KILLS
from experiments.digits.predictions import holds
from experiments.digits.settings import SCALES
from experiments.digits.text import held_out_problems
from experiments.on_policy.methods import METHODS
from experiments.on_policy.real import page as real
from experiments.on_policy.real.methods import SIZES
from experiments.on_policy.tables import bounds_of, plural, row_of, spread
from experiments.vocabularies.page import insert
from xtoken_core.atomic import atomic_write

PAGE = Path(__file__).parents[2] / "docs" / "on_policy.md"
RESULTS = [Path(__file__).parent / "results" / f"{scale}.json" for scale in ("full", "reduced")]
REAL = [RESULTS[0].with_name(f"real-{size}.json") for size in SIZES]
PREDICTIONS = Path(__file__).parent / "predictions.toml"
COLUMNS = ("completion_tokens", "finished", "staleness", "entropy", "data_wait", "teacher_wait", "rollout_wait")

Runs = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""Results by method and seed."""


def render(results: Sequence[Mapping[str, Any] | None]) -> str:
    """Return the tables of the digits at each size; a line for a size without a result."""
    parts = []
    for scale, result in zip(("full", "reduced"), results, strict=True):
        parts.append(f"The {scale} size has not been run." if result is None else render_size(result))
    return "\n\n".join(parts)


def render_size(result: Mapping[str, Any]) -> str:
    """Return the tables of the digits at one size."""
    runs: dict[str, dict[int, Mapping[str, Any]]] = {name: {} for name in METHODS}
    for run in result["runs"]:
        runs[run["method"]][run["seed"]] = run
    steps = result["settings"]["steps"] or result["settings"]["scale"]["go_on"]["steps"]
    machine = ", ".join(result["machine"]["gpus"]) or f"{result['machine']['cpus']} CPU cores"
    scale = result["settings"]["scale"]["name"]
    head = (
        f"The {scale} size, {steps} steps of given text and as many student tokens of the others, "
        f"{len(result['students'])} first students, {machine}. The teacher is right in "
        f"{right(result['teacher']):.1%} of the cases, first students in "
        f"{spread([right(student) for student in result['students']])}."
    )
    parts = [
        [head],
        list(_answers(runs)),
        list(_costs(runs, scale)),
        list(_predictions(runs, right(result["teacher"]))),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def right(measured: Mapping[str, Any]) -> float:
    """Return the fraction of right answers."""
    value: float = measured["exact_match"]["all"]
    return value


def _answers(runs: Runs) -> Iterator[str]:
    heads = ("", "seeds", "steps", "student tokens", "right answers", "in all contexts", "bits/byte, sources", *COLUMNS)
    yield row_of(heads)
    yield "|---" * len(heads) + "|"
    for name, own in runs.items():
        if not own:
            yield f"| {METHODS[name].title} | 0 | not complete |" + " |" * (4 + len(COLUMNS))
            continue
        values = list(own.values())
        cells = [
            METHODS[name].title, str(len(own)), f"{fmean(run['steps'] for run in values):.0f}",
            f"{fmean(run['tokens'] for run in values):,.0f}", spread([right(run) for run in values]),
            spread([run["right_in_contexts"] for run in values]),
            f"{fmean(run['bits_per_byte']['code'] for run in values):.3f}",
        ]  # fmt: skip
        for column in COLUMNS:
            found = [run["means"][column] for run in values if run["means"][column] is not None]
            cells.append(f"{fmean(found):.2f}" if found else "")
        yield row_of(cells)


def _costs(runs: Runs, scale: str) -> Iterator[str]:
    """Yield what completions cost on text that they do not ask for, and how many problems the answers are of."""
    given = runs["off_policy"]
    bits = {name: fmean(run["bits_per_byte"]["code"] for run in own.values()) for name, own in runs.items() if own}
    costs = [
        f"{bits[name] - bits['off_policy']:+.3f} {METHODS[name].title}"
        for name, method in METHODS.items()
        if method.fraction and name in bits and given
    ]
    if costs:
        count = sum(map(len, held_out_problems(SCALES[scale]).values()))
        yield (
            "Source text is forgotten, since completions hold little of it (its prompts are a word): bits per byte "
            f"beside off-policy chain are {', '.join(costs)}. Right answers are of {count} held-out problems after "
            "three solved ones; in all contexts: after none to five."
        )


def _predictions(runs: Runs, teacher: float) -> Iterator[str]:
    yield from ("| prediction | predicted | measured | |", "|---|---|---|---|")
    for prediction in tomllib.loads(PREDICTIONS.read_text(encoding="utf-8"))["prediction"]:
        low, high = prediction.get("low"), prediction.get("high")
        one, other = runs[prediction["method"]], runs[prediction["less"]]
        differences = [right(one[seed]) - right(other[seed]) for seed in one if seed in other]
        bounds = bounds_of(low, high)
        if not differences:
            yield f"| {prediction['says']} | {bounds} | not run | |"
            continue
        mean = fmean(differences)
        if prediction.get("gap"):
            mean /= teacher - fmean(right(other[seed]) for seed in one if seed in other)
        seeds = plural(len(differences), "seed")
        verdict = "as predicted" if holds(mean, low, high) else "**not**"
        yield f"| {prediction['says']} | {bounds} | {mean:+.3f} ({seeds}) | {verdict} |"


def kills(result: Mapping[str, Any] | None) -> str:
    """Return a sentence about the kills of a run's workers."""
    if result is None:
        return "Not run yet."
    by_victim = ", ".join(f"{count} of {name}" for name, count in result["kills"].items())
    back = sorted(result["back_s"])
    outcome = "no error" if not result["errors"] else "; ".join(result["errors"])
    oldest = plural(int(result["stalest"]), "step")
    return (
        f"{sum(result['kills'].values())} kills ({by_victim}; {result['while_publishing']} while the trainer wrote "
        f"weights) in a run of {result['steps']} steps on a CPU, half of each step's samples generated: {outcome}. No "
        f"completion was older than {oldest}; {result['skipped']} positions were skipped, since the tiny student wrote "
        f"bytes that are no text. Two steps after a kill were taken within {back[len(back) // 2]:.0f} s (median) and "
        f"{back[-1]:.0f} s (slowest), on two cores shared with other work."
    )


def written() -> str:
    """Return `docs/on_policy.md` as the result files ask for."""
    files = (*RESULTS, *REAL, KILLS)
    results = [json.loads(file.read_text(encoding="utf-8")) if file.exists() else None for file in files]
    page = insert(PAGE.read_text(encoding="utf-8"), render(results[: len(RESULTS)]), "experiments.on_policy.page")
    page = insert(page, real.render_file(), "experiments.on_policy.real.methods")
    page = insert(
        page, real.render(dict(zip(SIZES, results[len(RESULTS) : -1], strict=True))), "experiments.on_policy.real.page"
    )
    return insert(page, kills(results[-1]), "benchmarks.worker_kills.rollouts")


if __name__ == "__main__":
    atomic_write(PAGE, written())
