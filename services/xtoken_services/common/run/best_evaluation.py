"""The best evaluation of a run, and the one whose weights its `model/` has. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

BITS = "bits_per_byte"


def is_finite(value: Any) -> TypeGuard[float]:
    """Return whether a metric is a number; one that was not finite is null."""
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def is_better(evaluation: Mapping[str, Any], best: Mapping[str, Any] | None) -> bool:
    """Return whether an evaluation has fewer bits per byte than the best one before it; None: there is none yet.

    The untrained student of step 0 does not take part: the first steps may cost something that later ones regain.
    """
    bits = evaluation.get(BITS)
    return evaluation.get("step") != 0 and is_finite(bits) and (best is None or bits < best[BITS])


def keeps_best(status: Mapping[str, Any]) -> bool:
    """Return whether a run exports the weights of its best evaluation.

    Args:
        status: The fields of `GET /v1/runs/{id}`.
    """
    spec = status.get("spec") or {}
    return bool((spec.get("eval") or {}).get("keep_best"))


def exported_evaluation(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the evaluation of the weights that a run exports: the last, or with `eval.keep_best` the best so far.

    Args:
        status: As of `keeps_best`.

    Returns:
        A line of `eval.jsonl`; empty without one.
    """
    last: dict[str, Any] = status.get("evaluation") or {}
    best: dict[str, Any] = status.get("best_evaluation") or {}
    exported = ((status.get("summary") or {}).get("held_out") or {}).get("step")
    if not best or not keeps_best(status) or exported == last.get("step"):
        return last
    return best
