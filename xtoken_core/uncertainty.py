"""Standard errors of held-out figures over documents. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

GROUPS = 256
"""Groups of documents at most whose sums an evaluation keeps; up to so many documents each is a group of its own."""


def standard_error(nats: Sequence[float], sizes: Sequence[float]) -> float | None:
    """Return the standard error of the bits per byte of a text over its documents.

    The figure is a ratio of two sums over documents, whose variance is that of `nats - ratio * size` (ratio estimator:
    Cochran, Sampling Techniques, 1977, chapter 6).

    >>> round(standard_error([1.0, 2.0], [10, 10]), 6), standard_error([1.0], [10])
    (0.072135, None)

    Args:
        nats: Negative log-likelihood of each document, or the difference of two models'.
        sizes: Bytes of each.

    Returns:
        Bits per byte; None with fewer than two documents.
    """
    count, total = len(sizes), math.fsum(sizes)
    if count < 2:
        return None
    ratio = math.fsum(nats) / total
    squares = math.fsum((value - ratio * size) ** 2 for value, size in zip(nats, sizes, strict=True))
    return math.sqrt(squares * count / (count - 1)) / total / math.log(2)


def grouped(values: Sequence[float]) -> list[float]:
    """Return the sums of at most `GROUPS` groups, to which documents are dealt in turn.

    >>> grouped([1.5, 2.0])
    [1.5, 2.0]
    """
    return [math.fsum(values[first::GROUPS]) for first in range(min(GROUPS, len(values)))]
