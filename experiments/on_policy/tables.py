"""Cells of the tables of both experiments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, stdev


def row_of(cells: Iterable[str]) -> str:
    """Return a row of a table."""
    return "| " + " | ".join(cells) + " |"


def plural(count: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{count} {noun}" + "s" * (count != 1)


def spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation in percent."""
    return f"{fmean(values):.1%}" + (f" ± {100 * stdev(values):.1f}" if len(values) > 1 else "")


def bounds_of(low: float | None, high: float | None) -> str:
    """Format the predicted bounds: a lower bound, or both."""
    return f"at least {low:g}" if high is None else f"{low:g} to {high:g}"
