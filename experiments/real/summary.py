"""What the runs show: each method at its best learning rate and step on validation, reported on test."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.real.methods import METHODS, MICRO_BATCH_TOKENS

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
        tasks: Accuracy by task.
    """

    condition: str
    method: str
    weight: str
    seed: int
    rate: float
    step: int
    bits: Mapping[str, float]
    tasks: Mapping[str, float] = field(default_factory=dict)


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
            accuracies = {key.removeprefix(TASK): value for key, value in row.items() if key.startswith(TASK)}
            best.append(Outcome(condition, method, weight, seed, rate, row["step"], _bits(row), accuracies))
    return best


@dataclass(frozen=True)
class Choice:
    """What was best on validation of the first data seed.

    Attributes:
        weight: Name of the weights.
        rate: The learning rate.
    """

    weight: str
    rate: float


def choices(found: Sequence[Outcome]) -> dict[tuple[str, str], Choice]:
    """Return weights and learning rate of each condition and method, chosen on the first data seed."""
    weights = chosen(found, FIRST_SEED)
    return {
        (outcome.condition, outcome.method): Choice(outcome.weight, outcome.rate)
        for outcome in found
        if outcome.seed == FIRST_SEED and weights[outcome.condition, outcome.method] == outcome.weight
    }


def _bits(row: Mapping[str, Any]) -> dict[str, float]:
    named = {
        key.removeprefix(f"{VALIDATION}_"): value for key, value in row.items() if key.startswith(f"{VALIDATION}_")
    }
    return {"validation": row[VALIDATION], **named}


@dataclass(frozen=True)
class PartialSweep:
    """A method of which only some learning rates have run, compared with others at those rates.

    Attributes:
        method: The method.
        weight: Name of its weights.
        rates: Learning rates that have run.
        test: Bits per byte on the condition's own test set, at the rate and step that are best on validation.
        below: Bits per byte of cross-entropy and of chain with equal weights, at the same rates, minus the method's;
            None where they have not run there.
    """

    method: str
    weight: str
    rates: tuple[float, ...]
    test: float
    below: Mapping[str, float | None]


def partial_sweeps(result: Mapping[str, Any], condition: str) -> list[PartialSweep]:
    """Return the incomplete sweeps of the first data seed, the best first."""
    own = f"{VALIDATION}_{result['conditions'][condition]['source']}.test"
    runs: dict[tuple[str, str], dict[float, Mapping[str, Any]]] = defaultdict(dict)
    for run in result["runs"]:
        if (run["condition"], run["seed"]) == (condition, FIRST_SEED):
            runs[run["method"], run["weight"]][run["rate"]] = run
    complete = {
        (outcome.method, outcome.weight)
        for outcome in outcomes(result)
        if (outcome.condition, outcome.seed) == (condition, FIRST_SEED)
    }

    def best(key: tuple[str, str], rates: Sequence[float]) -> float | None:
        if not set(rates) <= runs[key].keys():
            return None
        rows = [row for rate in rates for row in runs[key][rate]["curve"]]
        return float(min(rows, key=lambda row: row[VALIDATION])[own])

    found = []
    for key in [key for key in runs if key not in complete]:
        rates = tuple(sorted(runs[key]))
        test = best(key, rates)
        if test is not None:
            others = {BASELINE: best((BASELINE, BASELINE), rates), CHAIN: best((CHAIN, "even"), rates)}
            below = {name: None if value is None else value - test for name, value in others.items()}
            found.append(PartialSweep(*key, rates, test, below))
    return sorted(found, key=lambda row: row.test)


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
        tried: Weights of the method whose sweep is complete on the first data seed.
        seeds: Data seeds that have run.
        test: Mean bits per byte on the condition's own test set.
        deviation: Standard deviation over the seeds; 0 for one seed.
        gain: Mean of cross-entropy's bits per byte minus the method's, seed by seed; None without a common seed.
        gain_deviation: Its standard deviation.
        first_gain: The same of the first data seed, on which all methods are compared; None if either lacks it.
        closed: Fraction of the gap from cross-entropy to the teacher that is closed; None without the teacher
            and where cross-entropy alone passes it.
        others: Mean bits per byte on the other test sets.
        memory: GPU memory at the peak of the median step, in bytes, the largest of the runs, by the tokens of their
            micro-batches.
    """

    method: str
    weight: str
    tried: int
    seeds: int
    test: float
    deviation: float
    gain: float | None
    gain_deviation: float
    first_gain: float | None
    closed: float | None
    others: Mapping[str, float]
    memory: Mapping[int, float]


def table(result: Mapping[str, Any], condition: str) -> list[Row]:
    """Return a condition's rows, the best first."""
    found = [outcome for outcome in outcomes(result) if outcome.condition == condition]
    own = f"{result['conditions'][condition]['source']}.test"
    baseline = {outcome.seed: outcome.bits[own] for outcome in found if outcome.method == BASELINE}
    teacher = result["teachers"].get(condition, {}).get(f"{VALIDATION}_{own}")
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in found:
        groups[outcome.method, outcome.weight].append(outcome)
    tried = Counter(outcome.method for outcome in found if outcome.seed == FIRST_SEED)
    memory: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for run in result["runs"]:
        peak = run.get("metrics", {}).get("memory_peak_bytes")
        if run["condition"] == condition and peak is not None:
            known, tokens = memory[run["method"], run["weight"]], run.get("micro_batch_tokens", MICRO_BATCH_TOKENS)
            known[tokens] = max(peak, known.get(tokens, 0.0))
    rows = [_row(*key, tried[key[0]], group, own, baseline, teacher, memory[key]) for key, group in groups.items()]
    return sorted(rows, key=lambda row: row.test)


def _row(
    method: str,
    weight: str,
    tried: int,
    group: Sequence[Outcome],
    own: str,
    baseline: Mapping[int, float],
    teacher: float | None,
    memory: Mapping[int, float],
) -> Row:
    test = [outcome.bits[own] for outcome in group]
    by_seed = {
        outcome.seed: baseline[outcome.seed] - outcome.bits[own] for outcome in group if outcome.seed in baseline
    }
    gains = list(by_seed.values())
    gaps = [baseline[outcome.seed] - teacher for outcome in group if outcome.seed in baseline] if teacher else []
    others = [name for name in group[0].bits if name not in ("validation", own)]
    return Row(
        method=method,
        weight=weight,
        tried=tried,
        seeds=len(group),
        test=statistics.fmean(test),
        deviation=_deviation(test),
        gain=statistics.fmean(gains) if gains else None,
        gain_deviation=_deviation(gains),
        first_gain=by_seed.get(FIRST_SEED),
        closed=statistics.fmean(gains) / statistics.fmean(gaps)
        if gains and gaps and statistics.fmean(gaps) > 0
        else None,
        others={name: statistics.fmean(outcome.bits[name] for outcome in group) for name in others},
        memory=memory,
    )


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def markdown(result: Mapping[str, Any], condition: str, titles: Mapping[str, str]) -> str:
    """Return a condition's table in Markdown."""
    rows = table(result, condition)
    names = list(rows[0].others) if rows else []
    head = [
        "method",
        "weights",
        "seeds",
        "test",
        "below cross-entropy",
        "on the first seed",
        "of the gap",
        *names,
        "memory",
    ]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        several = row.seeds > 1
        first = "" if row.first_gain is None else f"{row.first_gain:+.3f}"
        closed = "" if row.closed is None else f"{row.closed:.0%}"
        cells = [
            titles.get(row.method, row.method),
            f"{row.weight} of {row.tried}" if row.tried > 1 else row.weight,
            str(row.seeds),
            f"{row.test:.3f}" + f" ± {row.deviation:.3f}" * several,
        ]
        memory = _memory(row.memory)
        others = [f"{row.others[name]:.3f}" for name in names]
        lines.append(f"| {' | '.join([*cells, gain_cell(row), first, closed, *others, memory])} |")
    return "\n".join(lines) + "\n"


def gain_cell(row: Row) -> str:
    """Return a row's gain over cross-entropy, with its deviation where there are several seeds; empty without one."""
    if row.gain is None:
        return ""
    return f"{row.gain:+.3f}" + f" ± {row.gain_deviation:.3f}" * (row.seeds > 1)


def _memory(by_tokens: Mapping[int, float]) -> str:
    """Return peaks in GiB, those of other micro-batches than the usual ones with their tokens."""
    peaks = sorted((tokens != MICRO_BATCH_TOKENS, tokens, peak / 2**30) for tokens, peak in by_tokens.items())
    return ", ".join(f"{peak:.1f} at {tokens:,}" if other else f"{peak:.1f}" for other, tokens, peak in peaks)


def accuracies(result: Mapping[str, Any], condition: str, titles: Mapping[str, str]) -> str:
    """Return a condition's accuracy on its tasks in Markdown, at each run's best step on validation; empty without.

    Args:
        result: The result file's content.
        condition: The condition.
        titles: By method, its name in tables.
    """
    names = result["conditions"][condition].get("tasks") or ()
    found = [outcome for outcome in outcomes(result) if outcome.condition == condition and outcome.tasks]
    if not names or not found:
        return ""
    first = next(run["curve"][0] for run in result["runs"] if run["condition"] == condition)
    rows = [("the student before training", [first[f"{TASK}{name}"] for name in names])]
    ranked = sorted(found, key=lambda outcome: -sum(outcome.tasks[name] for name in names))
    rows += [(titles.get(each.method, each.method), [each.tasks[name] for name in names]) for each in ranked]
    lines = [f"| method | {' | '.join(names)} |", f"|{'---|' * (len(names) + 1)}"]
    lines += [f"| {title} | {' | '.join(f'{value:.1%}' for value in values)} |" for title, values in rows]
    return "\n".join(lines) + "\n"
