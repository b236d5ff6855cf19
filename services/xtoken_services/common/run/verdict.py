"""Verdict on two held-out results: better, worse, or no difference that counts. No torch."""

from __future__ import annotations

from enum import StrEnum

NOISE = 0.01
"""Bits per byte by which two runs may differ without a reason.

The differences between two losses on pretrained models, see docs/evidence.md, have a standard deviation of at most
0.006 over data seeds: a single pair of runs that differs by less than about twice that shows nothing."""


class Verdict(StrEnum):
    """Meaning of a difference of held-out bits per byte."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "no difference that counts"


def judge(change: float) -> Verdict:
    """Return the verdict on a change of held-out bits per byte, of which fewer are better.

    >>> judge(-0.02).value, judge(0.02).value, judge(0.0001).value
    ('better', 'worse', 'no difference that counts')
    """
    if abs(change) <= NOISE:
        return Verdict.SAME
    return Verdict.WORSE if change > 0 else Verdict.BETTER


def describe(change: float) -> str:
    """Return the verdict on a change with its size.

    >>> describe(-0.25)
    'better by 0.2500'
    >>> describe(0.0001)
    'no difference that counts (+0.0001; seeds alone differ by up to 0.01)'
    """
    verdict = judge(change)
    if verdict is Verdict.SAME:
        return f"{verdict} ({change:+.4f}; seeds alone differ by up to {NOISE:g})"
    return f"{verdict} by {abs(change):.4f}"
