"""A result file as tables want it: means, spreads, one name for every figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Measured = dict[str, Any]


class Summary:
    """A result file; false if there is none.

    Attributes:
        result: What it holds.
    """

    def __init__(self, result: dict[str, Any]) -> None:
        self.result = result

    def __bool__(self) -> bool:
        return bool(self.result)

    def runs(self, method: str) -> list[Measured]:
        """Return a method's runs, seed by seed."""
        return [run for run in self.result["runs"] if run["method"] == method]

    def students(self) -> list[Measured]:
        """Return the first students."""
        return list(self.result["students"].values())

    def teacher(self, name: str) -> list[Measured]:
        """Return a teacher, alone in a list; an empty one if it is not there."""
        return [self.result["teachers"][name]] if name in self.result["teachers"] else []

    def mean(self, method: str, path: str) -> float | None:
        """Return a method's mean over its seeds; None if it has not run."""
        found = [number(run, path) for run in self.runs(method)]
        known = [value for value in found if value is not None]
        return statistics.fmean(known) if known else None

    def difference(self, method: str, less: str, path: str) -> list[float]:
        """Return one method less another, seed by seed, for the seeds that both have."""
        ours, theirs = ({run["seed"]: number(run, path) for run in self.runs(name)} for name in (method, less))
        pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
        return [a - b for a, b in pairs if a is not None and b is not None]

    def mass(self, kind: str, tokens: int) -> float | None:
        """Return the mean mass of such chunks; None if there are none."""
        rows = [row["mass"] for row in self.result["mass"] if row["kind"] == kind and row["tokens"] == tokens]
        return float(rows[0]) if rows else None


def number(measured: Measured, path: str) -> float | None:
    """Return a value by the path of its names.

    >>> number({"exact_match": {"all": 0.5}}, "exact_match.all")
    0.5
    """
    found: Any = measured
    for name in path.split("."):
        if not isinstance(found, dict) or name not in found:
            return None
        found = found[name]
    return float(found)


def spread(values: Sequence[float | None], form: str) -> str:
    """Format a mean with the standard deviation, where there are several; `%` is a fraction.

    >>> spread([0.5, 0.7], "%"), spread([1.25], ".1f"), spread([None], "%")
    ('60.0% ± 14.1', '1.2', '')
    """
    known = [value for value in values if value is not None]
    if not known:
        return ""
    mean = statistics.fmean(known)
    text = f"{mean:.1%}" if form == "%" else format(mean, form)
    if len(known) == 1:
        return text
    deviation = statistics.stdev(known)
    return f"{text} ± {100 * deviation:.1f}" if form == "%" else f"{text} ± {format(deviation, form.lstrip('+'))}"
