"""The result file: rows of several machines in one, and which of the planned runs are still missing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.real.machines import joined_machines
from experiments.real.methods import CONDITIONS, DROPPED, METHODS, SEEDS, Cell, cells
from experiments.real.plan import planned_rates
from experiments.real.summary import VALIDATION, choices, outcomes

SAME_START = 0.005
"""Most bits per byte by which runs of one condition may differ before their first step."""
_ORDER = {cell: n for n, cell in enumerate(cells(tuple(CONDITIONS), tuple(METHODS), (), SEEDS))}


class OtherTextError(RuntimeError):
    """Two result files have a condition of the same name on other texts or models; the message names it."""


def read_result(file: Path) -> dict[str, Any]:
    """Return a result file's content; an empty result if there is none."""
    if file.is_file():
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return content
    return {"machine": {}, "conditions": {}, "teachers": {}, "runs": [], "not_run": []}


def merged(known: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return both results as one; where both have a run or a teacher's figures, those of `found` count.

    Args:
        known: A result file's content.
        found: Another one.

    Raises:
        OtherTextError: A condition's students differ before their first step.
    """
    _check_starts(known["runs"], found["runs"])
    runs = {cell_of(run): run for result in (known, found) for run in result["runs"]}
    names = known["conditions"].keys() | found["conditions"].keys()
    rows = [runs[cell] for cell in _in_order(runs)]
    planned = [cell for result in (known, found) for cell in map(cell_of, result["not_run"]) if cell in _ORDER]
    return {
        "machine": joined_machines(known["machine"], found["machine"]),
        "conditions": {name: vars(condition) for name, condition in CONDITIONS.items() if name in names},
        "teachers": {**known["teachers"], **found["teachers"]},
        "runs": rows,
        "not_run": [vars(cell) for cell in missing(rows, planned)],
    }


def missing(rows: Sequence[Mapping[str, Any]], planned: Iterable[Cell]) -> list[Cell]:
    """Return the planned runs that have no row.

    Of the first data seed these are the sweeps that were planned or begun, each method's first weights at all learning
    rates and the others at one (`rates_of`); of other seeds, those of a condition that was planned on them, with the
    weights and the rate that were best on the first one.

    Args:
        rows: Runs of a result file.
        planned: Runs that were planned.
    """
    done = {cell_of(row) for row in rows}
    cells_known = done | set(planned)
    swept = {(cell.condition, cell.method, cell.weight) for cell in cells_known if cell.seed == SEEDS[0]}
    first = {Cell(*each, rate, SEEDS[0]) for each in swept for rate in rates_of(*each, rows)} - done
    best = choices(outcomes({"runs": rows, "not_run": list(map(vars, first))}))
    seeds = {(cell.condition, cell.seed) for cell in cells_known if cell.seed != SEEDS[0]}
    others = {
        Cell(condition, method, choice.weight, choice.rate, seed)
        for (condition, method), choice in best.items()
        for planned_on, seed in seeds
        if planned_on == condition
    }
    return [*_in_order(first), *_in_order(others - done)]


def rates_of(condition: str, method: str, weight: str, rows: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """Return the learning rates at which weights are tried on the first data seed.

    For the first weights of a method these are all that are planned, or all of the condition. Others have the rate
    that is best with the first on validation, among those that have run; the largest if none has.

    Args:
        condition: The condition.
        method: The method.
        weight: Name of its weights.
        rows: Runs of a result file.
    """
    rates, first = planned_rates(condition, method), METHODS[method].first_weight
    if method in DROPPED:
        of = (condition, method, weight)
        return tuple(row["rate"] for row in rows if (row["condition"], row["method"], row["weight"]) == of)
    if weight == first:
        return rates
    found = [
        (evaluation[VALIDATION], row["rate"])
        for row in rows
        if (row["condition"], row["method"], row["weight"], row["seed"]) == (condition, method, first, SEEDS[0])
        for evaluation in row["curve"]
    ]
    return (min(found)[1] if found else rates[-1],)


def tried(some: Iterable[Cell], rows: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """Select the runs whose learning rate is tried with their weights.

    Args:
        some: Runs.
        rows: Runs of a result file.
    """
    return [cell for cell in some if cell.rate in rates_of(cell.condition, cell.method, cell.weight, rows)]


def cell_of(row: Mapping[str, Any]) -> Cell:
    """Return the run that a row is about."""
    return Cell(row["condition"], row["method"], row["weight"], row["rate"], row["seed"])


def _in_order(some: Iterable[Cell]) -> list[Cell]:
    return sorted(some, key=lambda cell: (_ORDER.get(cell, len(_ORDER)), cell.name))


def _start_of(row: Mapping[str, Any]) -> tuple[str, int]:
    """Return the condition of a run, with its data seed where each has a student of its own."""
    own = row["condition"] in CONDITIONS and CONDITIONS[row["condition"]].start
    return row["condition"], row["seed"] if own else SEEDS[0]


def _check_starts(known: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> None:
    begun = {_start_of(row): row["curve"][0] for row in known if row["curve"]}
    for row in found:
        start = begun.get(_start_of(row), {})
        for name in start.keys() & row["curve"][0].keys():
            if name.startswith("bits_per_byte") and abs(start[name] - row["curve"][0][name]) > SAME_START:
                raise OtherTextError(
                    f"{cell_of(row).name} begins at {row['curve'][0][name]:.4f} {name} and the known runs of "
                    f"{row['condition']} at {start[name]:.4f}: other texts or models, nothing was merged"
                )
