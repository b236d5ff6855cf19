"""What the runs show: each method at its best learning rate and step on validation, reported on test."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.real.methods import METHODS

VALIDATION = "bits_per_byte"
BASELINE, CHAIN, DEFAULT = "ce", "chain", "chain_fading"
"""Cross-entropy alone, chain with one weight to the end, and chain that fades, the default of `results/real.json`."""
FIRST_SEED = 0
TASK = "task_accuracy_"
_GROUP = ("condition", "method", "weight", "seed")


@dataclass(frozen=True)
class Outcome:
    """A method on one condition and data seed, at the learning rate and step that are best on validation.

    Attributes:
        condition: The condition.
        method: The method.
        weight: Name of its weights.
        seed: The data seed.
        rate: The best learning rate.
        step: The best step.
        bits: Bits per byte by text: `validation`, then the name of each test set.
    """

    condition: str
    method: str
    weight: str
    seed: int
    rate: float
    step: int
    bits: Mapping[str, float]


def outcomes(result: Mapping[str, Any]) -> list[Outcome]:
    """Return the best of every method, weights, condition and seed; ties go to the earlier run and step.

    The learning rate is chosen on the first data seed, from a whole sweep with the method's first weights: without one
    a method is left out. Its other weights need one rate, the best with the first. On other seeds the chosen rate alone
    counts.
    """
    partial = {tuple(cell[key] for key in _GROUP) for cell in result.get("not_run", ())}
    groups: dict[tuple[str, str, str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for run in result["runs"]:
        key = run["condition"], run["method"], run["weight"], run["seed"]
        first = *key[:2], METHODS[run["method"]].first_weight, FIRST_SEED
        if not partial.intersection((key, first)):
            groups[key].append(run)
    best: list[Outcome] = []
    rates: dict[tuple[str, str, str], float] = {}
    for (condition, method, weight, seed), runs in sorted(groups.items(), key=lambda item: item[0][3]):
        swept = rates.get((condition, method, weight))
        rows = [(run["rate"], row) for run in runs for row in run["curve"]]
        if seed != FIRST_SEED:
            rows = [pair for pair in rows if pair[0] == swept]
        if rows:
            rate, row = min(rows, key=lambda pair: pair[1][VALIDATION])
            rates.setdefault((condition, method, weight), rate)
            best.append(Outcome(condition, method, weight, seed, rate, row["step"], _bits(row)))
    return best


def choices(found: Sequence[Outcome]) -> dict[tuple[str, str], Outcome]:
    """Return the outcome of each condition and method whose weights and rate are chosen: on the first data seed."""
    weights = chosen(found, FIRST_SEED)
    return {
        (outcome.condition, outcome.method): outcome
        for outcome in found
        if outcome.seed == FIRST_SEED and weights[outcome.condition, outcome.method] == outcome.weight
    }


def _bits(row: Mapping[str, Any]) -> dict[str, float]:
    named = {
        key.removeprefix(f"{VALIDATION}_"): value for key, value in row.items() if key.startswith(f"{VALIDATION}_")
    }
    return {"validation": row[VALIDATION], **named}


def as_shipped(found: Sequence[Outcome]) -> list[Outcome]:
    """Leave out the default with other weights than its first, which are those that the library sets."""
    return [o for o in found if o.method != DEFAULT or o.weight == METHODS[DEFAULT].first_weight]


def untrained(found: Sequence[Outcome], condition: str) -> list[str]:
    """Return the methods that never got better on validation than the student before its first step."""
    steps: dict[str, set[int]] = defaultdict(set)
    for outcome in found:
        if outcome.condition == condition:
            steps[outcome.method].add(outcome.step)
    return sorted(method for method, best in steps.items() if best == {0})


def chosen(found: Sequence[Outcome], seed: int) -> dict[tuple[str, str], str]:
    """Return the weights of each condition and method that are best on validation of one data seed."""
    best: dict[tuple[str, str], Outcome] = {}
    for outcome in found:
        key = outcome.condition, outcome.method
        if outcome.seed == seed and (key not in best or outcome.bits["validation"] < best[key].bits["validation"]):
            best[key] = outcome
    return {key: outcome.weight for key, outcome in best.items()}


@dataclass(frozen=True)
class Row:
    """A method's line in a condition's table.

    Attributes:
        method: The method.
        weight: Name of its weights.
        seeds: Data seeds that have run.
        test: Mean bits per byte on the condition's own test set.
        gain: Mean of cross-entropy's bits per byte minus the method's, seed by seed; None without a common seed.
        gain_deviation: Its standard deviation; 0 for one seed.
        others: Mean bits per byte on the other test sets.
    """

    method: str
    weight: str
    seeds: int
    test: float
    gain: float | None
    gain_deviation: float
    others: Mapping[str, float]


def table(result: Mapping[str, Any], condition: str) -> list[Row]:
    """Return a condition's rows, the best first."""
    found = [outcome for outcome in outcomes(result) if outcome.condition == condition]
    own = f"{result['conditions'][condition]['source']}.test"
    baseline = {outcome.seed: outcome.bits[own] for outcome in found if outcome.method == BASELINE}
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in found:
        groups[outcome.method, outcome.weight].append(outcome)
    rows = []
    for key, group in groups.items():
        gains = [baseline[each.seed] - each.bits[own] for each in group if each.seed in baseline]
        gain = statistics.fmean(gains) if gains else None
        deviation = statistics.stdev(gains) if len(gains) > 1 else 0.0
        means = {name: statistics.fmean(each.bits[name] for each in group) for name in group[0].bits}
        others = {name: mean for name, mean in means.items() if name not in ("validation", own)}
        rows.append(Row(*key, len(group), means[own], gain, deviation, others))
    return sorted(rows, key=lambda row: row.test)


def markdown(result: Mapping[str, Any], condition: str, titles: Mapping[str, str]) -> str:
    """Return a condition's table in Markdown."""
    rows = table(result, condition)
    names = list(rows[0].others) if rows else []
    cells = []
    for row in rows:
        figures = [f"{row.test:.3f}", gain_cell(row), *(f"{row.others[name]:.3f}" for name in names)]
        cells.append([titles.get(row.method, row.method), row.weight, row.seeds, *figures])
    return markdown_table(["method", "weights", "seeds", "test", "below cross-entropy", *names], cells) + "\n"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def gain_cell(row: Row) -> str:
    """Return a row's gain over cross-entropy, with its deviation where there are several seeds; empty without one."""
    if row.gain is None:
        return ""
    return f"{row.gain:+.3f}" + f" ± {row.gain_deviation:.3f}" * (row.seeds > 1)
