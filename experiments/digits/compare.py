"""Whether a repetition says what a result file says: the sign of a difference, and how far its seeds lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

_DEVIATIONS = 3.0
_TIMES = 4.0
_RESOLUTION = 0.02
"""A few problems of the held-out ones: below it differences and spreads are not told apart."""


def mismatches(known: Sequence[float], again: Sequence[float]) -> list[str]:
    """What a repetition contradicts; nothing if it agrees.

    Args:
        known: A difference of two methods, seed by seed, as it was published.
        again: As it came out again.

    Returns:
        A line for each of: the sign, where the published mean is further from 0 than its spread; the mean, where both
        lie further apart than three times their spread; the spread, where the new one is four times as large.
    """
    means = [statistics.fmean(values) for values in (known, again)]
    spreads = [max(statistics.stdev(values), _RESOLUTION) for values in (known, again)]
    told = f"published {means[0]:+.3f} ± {spreads[0]:.3f}, now {means[1]:+.3f} ± {spreads[1]:.3f}"
    found = []
    if abs(means[0]) > spreads[0] and means[0] * means[1] <= 0:
        found.append(f"the sign: {told}")
    if abs(means[0] - means[1]) > _DEVIATIONS * max(spreads):
        found.append(f"the mean: {told}")
    if spreads[1] > _TIMES * spreads[0]:
        found.append(f"the spread: {told}")
    return found
