"""Estimate of a run's remaining time, from the duration of its steps and of its evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

RECENT_STEPS = 20
"""Steps whose mean duration is extrapolated."""


def remaining_s(status: Mapping[str, Any], steps: Sequence[Mapping[str, Any]] = ()) -> float | None:
    """Return the seconds until a run's last step and evaluation; None if unknown.

    Args:
        status: The fields of `GET /v1/runs/{id}`.
        steps: Metrics of its last steps; left out, the last one's duration counts.
    """
    last = status.get("last") or {}
    durations = [line["seconds"] for line in steps[-RECENT_STEPS:] or [last] if line.get("seconds")]
    step, total = status.get("step"), status.get("steps")
    if status.get("state") != "running" or not durations or step is None or total is None:
        return None
    per_step = float(sum(durations)) / len(durations)
    evaluation = (status.get("evaluation") or {}).get("seconds") or 0.0
    left: int = total - step
    return left * per_step + evaluations_left(status, step, total) * float(evaluation)


def evaluations_left(status: Mapping[str, Any], step: int, steps: int) -> int:
    """Return the number of evaluations that are still to come, the one under way included."""
    every = ((status.get("spec") or {}).get("eval") or {}).get("every")
    if not every:
        return 0
    done = (status.get("evaluation") or {}).get("step", -1)
    due = {*range(0, steps, every), steps}
    return sum(at > done and at >= step for at in due)


def duration(seconds: float) -> str:
    """Format a duration by its two largest units.

    >>> [duration(s) for s in (7.2, 200, 7500)]
    ['7 s', '3 min 20 s', '2 h 5 min']
    """
    whole = math.ceil(seconds) if seconds < 60 else round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
