"""Merge result files of runs from several machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.machines import joined_machines
from experiments.real.results import SAME_START, OtherTextError

SAME = ("condition", "learning_rate")
"""What both results must have in common."""


def merged(known: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return both results as one; of a run that both have, the row that went further counts, or else that of `found`.

    Args:
        known: A result file's content.
        found: Another one.

    Raises:
        OtherTextError: They are of other texts, models or settings.
    """
    _check_same(known, found)
    runs = dict(known["runs"])
    for name, run in found["runs"].items():
        if name not in runs or _reached(run) >= _reached(runs[name]):
            runs[name] = run
    taken = {name for name, run in found["runs"].items() if runs[name] is run}
    left = {*known["not_finished"]} - taken | {*found["not_finished"]} & taken
    left |= {name for name in found["not_finished"] if name not in runs}
    return {
        **known,
        **found,
        "machine": joined_machines(known["machine"], found["machine"]),
        "runs": dict(sorted(runs.items())),
        "not_finished": sorted(left),
        "builds": {**known["builds"], **found["builds"]},
    }


def _reached(run: Mapping[str, Any]) -> int:
    """Return the step of a run's last evaluation."""
    return max((row["step"] for row in run["curve"]), default=-1)


def _check_same(known: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for name in SAME:
        if known[name] != found[name]:
            raise OtherTextError(f"{name} is {found[name]}, and in the known result {known[name]}: nothing was merged")
    begun = next((run["curve"][0] for run in known["runs"].values() if run["curve"]), {})
    for run_name, run in found["runs"].items():
        start = run["curve"][0] if run["curve"] else {}
        for name in begun.keys() & start.keys():
            if name.startswith("bits_per_byte") and abs(begun[name] - start[name]) > SAME_START:
                raise OtherTextError(
                    f"{run_name} begins at {start[name]:.4f} {name} and the known runs at {begun[name]:.4f}: "
                    "other texts or models, nothing was merged"
                )
