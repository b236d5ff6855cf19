"""Metrics as workers write them and as other programs may have changed them. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SAMPLE = "sample.json"
"""File of a run's directory with what a look at a sample of its text has found."""
BITS = "bits_per_byte"
ERROR = "standard_error"
"""That of the bits per byte over documents, in a line of `eval.jsonl`."""
TEACHER_BITS = "teacher_bits_per_byte"
"""Bits per byte of the best teacher, in a line of `eval.jsonl`; with several, `_t{i}` is appended for each."""
BEYOND_TEACHER = "teacher_difference_error"
"""Standard error of how far the student is from the best teacher, over the documents, in a line of `eval.jsonl`."""
TASK = "task_accuracy_"
"""Prefix of the accuracy on a task, by its name, in a line of `eval.jsonl`."""
MOST_UNREACHABLE = 0.1
UNREACHABLE = "unreachable_mass"


def with_error(line: Mapping[str, Any], *, amount: bool = True) -> str:
    """Return a line's bits per byte with their standard error over documents, and of how much text they are.

    >>> with_error({"bits_per_byte": 1.25, "standard_error": 0.02, "documents": 12, "bytes": 34000})
    '1.2500 ± 0.0200 (12 documents, 34,000 bytes)'
    >>> with_error({"bits_per_byte": 1.25, "standard_error": None, "documents": 1, "bytes": 1800})
    '1.2500 (1 document, 1,800 bytes)'

    Args:
        line: A line of `eval.jsonl` with a result.
        amount: State documents and bytes.
    """
    known = finite(line)
    text = f"{known[BITS]:.4f}" + (f" ± {known[ERROR]:.4f}" if ERROR in known else "")
    if not amount or not {"documents", "bytes"} <= known.keys():
        return text
    return f"{text} ({known['documents']:.0f} document{'s' * (known['documents'] != 1)}, {known['bytes']:,.0f} bytes)"


def table(document: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """Return a table of a document; empty if there is none."""
    value = None if document is None else document.get(name)
    return value if isinstance(value, dict) else {}


def finite(line: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the finite numbers of a line of metrics, in which one that is not finite is null."""
    return {name: value for name, value in line.items() if _is_finite(value)} if line else {}


def task_accuracy(evaluation: Mapping[str, Any]) -> float | None:
    """Return an evaluation's mean accuracy over its tasks; None without any.

    >>> task_accuracy({"step": 8, "task_accuracy_sums": 0.5, "task_accuracy_words": 1.0})
    0.75
    """
    found = [value for name, value in finite(evaluation).items() if name.startswith(TASK)]
    return math.fsum(found) / len(found) if found else None


def is_better(evaluation: Mapping[str, Any], best: Mapping[str, Any] | None, *, by_tasks: bool = False) -> bool:
    """Return whether an evaluation is better than the best one before it; None: there is none yet.

    It has fewer bits per byte. The untrained student of step 0 does not take part: the first steps may cost something
    that later ones regain. By tasks it has a higher accuracy, and step 0 takes part: a student may come well trained.
    """
    if by_tasks:
        accuracy, before = task_accuracy(evaluation), None if best is None else task_accuracy(best)
        return accuracy is not None and (before is None or accuracy > before)
    bits = finite(evaluation).get(BITS)
    return evaluation.get("step") != 0 and bits is not None and (best is None or bits < best[BITS])


def covered(first: Mapping[str, Any] | None, last: Mapping[str, Any] | None) -> float | None:
    """Return the part of the distance from student to teacher, in bits per byte at the first evaluation, that is gone.

    >>> covered({"bits_per_byte": 2.0, "teacher_bits_per_byte": 1.0}, {"bits_per_byte": 1.75})
    0.25

    Returns:
        More than 1 if the student has passed the teacher; None without both figures, or if it began no worse.
    """
    start, end = finite(first), finite(last)
    if not {BITS, TEACHER_BITS} <= start.keys() or BITS not in end or start[BITS] <= start[TEACHER_BITS]:
        return None
    return (start[BITS] - end[BITS]) / (start[BITS] - start[TEACHER_BITS])


def unreachable_warnings(last: Mapping[str, Any]) -> dict[str, str]:
    """Return a warning for every teacher of which too much mass has no gradient, from a step's metrics."""
    masses = {name: value for name, value in finite(last).items() if name.startswith(UNREACHABLE)}
    lines = {}
    for name, mass in masses.items():
        if mass > MOST_UNREACHABLE:
            teacher = f"teacher {name.rpartition('_t')[2]}" if len(masses) > 1 else "the teacher"
            lines[name] = (
                f"{mass:.0%} of the probability of {teacher} is on tokens that no row of the projection names "
                f'({name}): P-KL has no gradient for them; use loss.mode = "chain", "alm" or "gold"'
            )
    return lines


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False
