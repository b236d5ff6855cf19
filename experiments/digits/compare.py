"""Comparison of a repetition with a result file: the sign of a difference, and how far its seeds lie apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

RESOLUTIONS = {
    "exact_match.all": 0.02,
    "numerals.right": 0.005,
    "kl_chunks": 0.01,
    "bits_per_byte.arithmetic": 0.01,
}
"""The compared measures and their resolutions: a few of the reduced version's held-out
problems; of the other figures, a few units of the last place that the table shows."""

_STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Two-sided quantiles of 95% of Student's t, by the number of seeds."""
_DEVIATIONS = 3.0
_TIMES = 4.0


def mismatches(known: Sequence[float], again: Sequence[float], *, resolution: float) -> list[str]:
    """Return the contradictions of a repetition; none if it agrees.

    Args:
        known: A difference of two methods, seed by seed, as it was published; two to five seeds.
        again: As it came out again.
        resolution: Spreads below this count as this.

    Returns:
        A line for each of: the sign, where the published mean's interval of 95% leaves 0 out; the mean, where both lie
        further apart than three times the larger spread; the spread, where the new one is four times as large.
    """
    means = [statistics.fmean(values) for values in (known, again)]
    spreads = [max(statistics.stdev(values), resolution) for values in (known, again)]
    both = f"published {means[0]:+.3f} ± {spreads[0]:.3f}, now {means[1]:+.3f} ± {spreads[1]:.3f}"
    found = []
    if has_sign(known, resolution=resolution) and means[0] * means[1] <= 0:
        found.append(f"the sign: {both}")
    if abs(means[0] - means[1]) > _DEVIATIONS * max(spreads):
        found.append(f"the mean: {both}")
    if spreads[1] > _TIMES * spreads[0]:
        found.append(f"the spread: {both}")
    return found


def has_sign(values: Sequence[float], *, resolution: float) -> bool:
    """Return whether the interval of 95% around the mean leaves 0 out."""
    spread = max(statistics.stdev(values), resolution)
    return abs(statistics.fmean(values)) > _STUDENT_T[len(values)] * spread / math.sqrt(len(values))
