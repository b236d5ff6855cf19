"""Lines of metrics, as a trainer writes them and as other programs may have changed them. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

BITS = "bits_per_byte"


def table(document: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """Return a table of a document; empty if there is none."""
    value = None if document is None else document.get(name)
    return value if isinstance(value, dict) else {}


def finite(line: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the finite numbers of a line of metrics, in which one that is not finite is null."""
    return {name: value for name, value in line.items() if _is_finite(value)} if line else {}


def is_better(evaluation: Mapping[str, Any], best: Mapping[str, Any] | None) -> bool:
    """Return whether an evaluation has fewer bits per byte than the best one before it; None: there is none yet.

    The untrained student of step 0 does not take part: the first steps may cost something that later ones regain.
    """
    bits = finite(evaluation).get(BITS)
    return evaluation.get("step") != 0 and bits is not None and (best is None or bits < best[BITS])


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False
