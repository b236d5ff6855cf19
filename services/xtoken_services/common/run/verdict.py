"""Verdict on two held-out results: better, worse, or no difference that counts. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from xtoken_core.uncertainty import standard_error
from xtoken_services.common.run.metric_lines import BITS, finite

NOISE = 0.01
"""Bits per byte by which two runs may differ without a reason.

The differences between two losses on pretrained models, see docs/evidence.md, have a standard deviation of at most
0.006 over data seeds: a single pair of runs that differs by less than about twice that shows nothing."""
ERRORS = 2.0
"""Standard errors of the difference over documents that it has to exceed too."""


class Verdict(StrEnum):
    """Meaning of a difference of held-out bits per byte."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "no difference that counts"


@dataclass(frozen=True)
class Difference:
    """A difference of held-out bits per byte, of which fewer are better.

    Attributes:
        bits: The difference.
        error: Its standard error over the documents that both results are of; None if there are not two of them.
    """

    bits: float
    error: float | None = None

    @property
    def beyond_error(self) -> bool:
        """True if the documents show it, whatever seeds do."""
        return self.error is not None and abs(self.bits) > ERRORS * self.error

    @property
    def verdict(self) -> Verdict:
        """Meaning of the difference.

        >>> Difference(-0.02, 0.001).verdict.value, Difference(0.02, 0.001).verdict.value
        ('better', 'worse')
        """
        if abs(self.bits) <= NOISE or not self.beyond_error:
            return Verdict.SAME
        return Verdict.WORSE if self.bits > 0 else Verdict.BETTER

    def __str__(self) -> str:
        """Return the verdict with the difference and its standard error.

        >>> str(Difference(-0.25, 0.02))
        'better by 0.2500 ± 0.0200'
        >>> str(Difference(0.0001, 0.02))
        'no difference that counts (+0.0001; seeds alone differ by up to 0.01)'
        >>> str(Difference(-0.18))
        'no difference that counts (-0.1800; two documents or more that both have measured are needed: eval.max_bytes)'
        """
        if self.verdict is not Verdict.SAME:
            return f"{self.verdict} by {abs(self.bits):.4f} ± {self.error:.4f}"
        why = "two documents or more that both have measured are needed: eval.max_bytes"
        if self.error is not None:
            why = f"two standard errors are {ERRORS * self.error:.4f}: raise eval.max_bytes"
        if abs(self.bits) <= NOISE:
            why = f"seeds alone differ by up to {NOISE:g}"
        return f"{self.verdict} ({self.bits:+.4f}; {why})"


def difference(result: Mapping[str, Any], other: Mapping[str, Any]) -> Difference | None:
    """Return how a line of `eval.jsonl` differs from another: the paired difference over their documents.

    Args:
        result: The line.
        other: What is subtracted.

    Returns:
        The difference; None if a line has no result. It has no error if the two are not of the same documents.
    """
    own, others = finite(result).get(BITS), finite(other).get(BITS)
    if own is None or others is None:
        return None
    try:
        sizes, pairs = result["group_bytes"], zip(result["group_nats"], other["group_nats"], strict=True)
        error = standard_error([a - b for a, b in pairs], sizes) if sizes == other["group_bytes"] else None
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):  # an older run, or a changed file
        error = None
    return Difference(own - others, error)
