"""The runs that the result file lacks, each once the runs that choose its weights and its learning rate have finished.

A method's first weights run at every learning rate, its other weights at the best of these, and other data seeds with
the best of all. So most runs are known only while others finish: `run_remaining` chooses them as it goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.jobs import Job, finished, run_all
from experiments.real.methods import CHAT, CONDITIONS, METHODS, SEEDS, Cell, job
from experiments.real.results import all_cells, cell_of, missing, read_result, without
from experiments.real.stages import finished_rows, prepare, write_sample

LONG_STEPS = 600
"""A run of so many steps goes before shorter ones on a GPU that MPS shares: it would be the last to end."""
UNKNOWN_GIB = 20.0
"""Taken for a method none of whose runs has told its memory."""
TEACHER_GIB, RESERVED = 4.0, 1.2
"""GPU memory of a teacher with its ring, and what a trainer takes for each GiB that it has in use at most. Estimates on
the safe side: by them eight runs that were seen to take 116 GiB together take 136."""


def remaining(state: Path, known: Path, again: Sequence[str] = ()) -> list[Cell]:
    """Return the runs that can start now, in the order in which they should.

    Long ones are first, conditions that repeat another one with a change of settings last. In between come those that
    the most other runs wait for, then first weights, whose learning rates are all known, and the rest method by method.

    Args:
        state: Directory of models, texts and runs; finished runs in it count.
        known: The result file, which says what was planned.
        again: Methods and conditions whose rows in the result file do not count, say because their text was generated
            again.
    """
    content = without(read_result(known), again)
    planned = [cell_of(row) for row in (*content["runs"], *content["not_run"])]
    rows: dict[Cell, Mapping[str, Any]] = {cell_of(row): row for row in content["runs"]}
    rows |= {cell_of(row): row for row in finished_rows(state, all_cells())}
    needed = missing(list(rows.values()), planned)
    begun = {(cell.condition, cell.method) for cell in needed if _is_first(cell)}
    chosen = {(cell.condition, cell.method) for cell in needed if cell.seed == SEEDS[0]}
    ready = [
        cell
        for cell in needed
        if _is_first(cell) or (cell.condition, cell.method) not in (begun if cell.seed == SEEDS[0] else chosen)
    ]
    order = {name: number for number, name in enumerate(METHODS)}
    waiting = Counter((cell.condition, cell.method) for cell in set(needed) - set(ready))

    def sort_key(cell: Cell) -> tuple[bool, int, int, bool, int, int]:
        condition, waits = CONDITIONS[cell.condition], waiting[cell.condition, cell.method]
        return bool(condition.note), -condition.steps, -waits, not _is_first(cell), order[cell.method], cell.seed

    ready.sort(key=sort_key)
    return [cell for cell in ready if _has_materials(state, cell)]


def run_remaining(
    state: Path,
    known: Path,
    wanted: Callable[[Cell], bool],
    *,
    side_by_side: int,
    gib: float,
    until: float,
    device: str,
    gpus: int,
    least_s: float,
    patience: int,
    again: Sequence[str] = (),
) -> bool:
    """Make the runs that the result file lacks; return True if none of those that can start is left.

    Args:
        state: Directory of models, texts and runs.
        known: The result file.
        wanted: Returns True for the runs that are made.
        side_by_side: Number of runs at a time.
        gib: GPU memory that they may take together on one GPU.
        until: Time on the monotonic clock at which all are stopped.
        device: `workers.device` of every run.
        gpus: Number of GPUs that the runs are spread over.
        least_s: Seconds before `until` in which no run is started any more.
        patience: Evaluations in a row without a better one after which a run ends; 0: it goes on to its last step.
        again: Methods and conditions whose rows in the result file do not count.

    Raises:
        MissingSourceError: A model or text has not been made.
    """
    before = read_result(known)["runs"]
    prepared: set[str] = set()

    def offered() -> list[Job]:
        memory = memory_of([*before, *finished_rows(state, all_cells())])
        cells = [cell for cell in remaining(state, known, again) if wanted(cell)]
        if fresh := [cell for cell in cells if cell.name not in prepared]:
            prepare(state, fresh)
            prepared.update(cell.name for cell in fresh)
        for cell in cells:
            write_sample(state / "texts", cell)
        return [
            replace(
                job(cell, device=device, patience=patience),
                gib=memory.get((cell.method, CONDITIONS[cell.condition].student), UNKNOWN_GIB),
                low_priority=CONDITIONS[cell.condition].steps < LONG_STEPS,
            )
            for cell in cells
        ]

    return run_all(state, offered, side_by_side=side_by_side, until=until, gpus=gpus, gib=gib, least_s=least_s)


def waiting_for_controls(state: Path, known: Path) -> list[Cell]:
    """Return the runs that the result file lacks and that need what the stage `controls` makes, with all data seeds.

    Args:
        state: Directory of models and texts.
        known: The result file.
    """
    needed = [cell for cell in map(cell_of, read_result(known)["not_run"]) if not _has_materials(state, cell)]
    sampled = [replace(cell, seed=seed) for cell in needed if METHODS[cell.method].samples for seed in SEEDS]
    return list(dict.fromkeys([*needed, *sampled]))


def finished_or_missing(state: Path, known: Path) -> list[Cell]:
    """Return the runs that have finished in this directory, and those that the result file lacks.

    Args:
        state: Directory of the runs.
        known: The result file.
    """
    here = [cell for cell in all_cells() if finished(state, cell.name)]
    return list(dict.fromkeys([*here, *map(cell_of, read_result(known)["not_run"])]))


def memory_of(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """Return the GPU memory of a run by method and student, in GiB: what the known ones took at most.

    Args:
        rows: Runs of a result file.
    """
    found: dict[tuple[str, str], float] = {}
    for row in rows:
        peak = row["metrics"].get("memory_peak_bytes")
        if peak is not None:
            key = row["method"], CONDITIONS[row["condition"]].student
            found[key] = max(found.get(key, 0.0), TEACHER_GIB + RESERVED * peak / 2**30)
    return found


def _is_first(cell: Cell) -> bool:
    return cell.seed == SEEDS[0] and cell.weight == METHODS[cell.method].first_weight


def _has_materials(state: Path, cell: Cell) -> bool:
    """Return True if the stage `controls` has made what a run needs of it, or it needs nothing of it."""
    method, texts = METHODS[cell.method], state / "texts"
    chat = CONDITIONS[cell.condition].source != CHAT or (texts / f"{CHAT}.test.jsonl").is_file()
    samples = not method.samples or (texts / cell.text).is_file()
    return chat and samples and (state / "models" / method.teacher).is_dir()
