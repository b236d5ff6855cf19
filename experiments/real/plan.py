"""The planned sweeps in order of importance: what a machine that is given back early leaves out stands last."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.real.methods import (
    AGAIN,
    ALONE_COLD,
    ALONE_ON,
    ANSWERED,
    COLD_START,
    CONDITIONS,
    FEW,
    FEW_COLD,
    FEW_ON,
    FOR_GEMMA,
    GEMMA3,
    GERMAN_TEACHER,
    INSTRUCTIONS,
    METHODS,
    MID_ALL,
    MID_COLD,
    MID_LONG,
    MID_ON,
    NO_END,
    ORDER_SIZES,
    ORDERS_ALL,
    PART_COLD,
    PART_LONG,
    PART_ON,
    QWEN05,
    QWEN15,
    SEEDS,
    START,
    START_RATE,
    TWO_TEXTS,
    Cell,
)
from experiments.real.run_files import student_of, teachers_of
from experiments.real.summary import TASK

PYTHON, GERMAN, FRENCH, WEAK, WEAK_LONG = (
    "qwen-python-32m", "qwen-de-500k", "qwen-fr-500k", "gemma-de-2m", "gemma-de-6m"
)  # fmt: skip
TO_GEMMA, TO_QWEN, PROBLEMS = "qwen-de-500k-to-gemma", "qwen-de-500k-to-qwen", "qwen-problems"
ON_POLICY, PROBLEMS_NO_END, COLD_NO_END = "qwen-problems-on", f"{PROBLEMS}{NO_END}", f"{COLD_START}{NO_END}"
_ALONE, _DRAWN = ("on_jsd_sharp", "ce", "chain", "chain_adaptive"), ("on_jsd_hot", "on_jsd_warm")
_CONTINUED = ("on_half_sharp", "on_jsd_sharp", "ce", "chain_shots", "on_jsd")
PLAN = (
    (GERMAN_TEACHER, "ce", (5e-5,)),
    (TWO_TEXTS, "chain_routed", (4e-4,)),
    (TWO_TEXTS, "chain", (4e-4,)),
    (TWO_TEXTS, "chain_both", (4e-4,)),
    (TWO_TEXTS, "chain_second", (4e-4,)),
    (PYTHON, "ce", (4e-4, 2e-4, 1e-4)),
    (PYTHON, "chain_adaptive", (2e-4, 1e-4)),
    (PYTHON, "chain_fading", (2e-4,)),
    (PYTHON, "p_kl_scaled", (2e-4,)),
    (PYTHON, "alm1", (2e-4,)),
    (GERMAN, "ce", (2e-4, 4e-4, 1e-4, 8e-4)),
    (GERMAN, "chain_adaptive", (4e-4, 8e-4)),
    (GERMAN, "chain_fading", (4e-4,)),
    (GERMAN, "chain", (4e-4,)),
    (GERMAN, "p_kl_scaled", (4e-4,)),
    (GERMAN, "alm1", (4e-4,)),
    (FRENCH, "ce", (2e-4, 4e-4, 8e-4)),
    (FRENCH, "chain_adaptive", (4e-4, 8e-4)),
    (FRENCH, "chain_fading", (4e-4,)),
    (FRENCH, "chain", (4e-4,)),
    (WEAK, "ce", (2e-4,)),
    (WEAK, "chain_adaptive", (2e-4,)),
    (WEAK, "chain_fading", (2e-4,)),
    (WEAK, "chain", (2e-4,)),
    (WEAK_LONG, "ce", (2e-4,)),
    (WEAK_LONG, "chain_adaptive", (2e-4,)),
    (WEAK_LONG, "chain_fading", (2e-4,)),
    (WEAK_LONG, "chain", (2e-4,)),
    (GERMAN, "chain_adaptive", (1.6e-3,)),
    (GERMAN, "p_kl_scaled", (8e-4,)),
    (PROBLEMS_NO_END, "ce", (2e-4, 4e-4)),
    (PROBLEMS_NO_END, "chain_adaptive", (2e-4,)),
    (TO_GEMMA, "ce", (5e-5, 1e-4, 2e-5)),
    (TO_GEMMA, "chain_adaptive", (5e-5,)),
    (TO_QWEN, "ce", (5e-5, 1e-4)),
    (TO_QWEN, "kd_same", (5e-5, 1e-4)),
    (PYTHON, "ce", (5e-5,)),
    (PYTHON, "p_kl_scaled", (1e-4,)),
    (TO_GEMMA, "chain_fading", (1e-4, 5e-5)),
    (TO_GEMMA, "chain", (1e-4, 5e-5)),
    (GERMAN, "bpm", (4e-4,)),
    (GERMAN, "x_token_v6", (4e-4,)),
    (PROBLEMS_NO_END, "chain_adaptive_shots", (2e-4, 4e-4)),
    (COLD_START, "ce", (START_RATE,)),
    (COLD_NO_END, "ce", (START_RATE,)),
    (PROBLEMS_NO_END, "chain_fading", (2e-4,)),
    (PROBLEMS_NO_END, "chain", (2e-4,)),
    (PROBLEMS_NO_END, "chain_shots", (2e-4,)),
    (ON_POLICY, "ce", (3e-5,)),
    (ON_POLICY, "chain_shots", (3e-5,)),
    (ON_POLICY, "on_reverse", (3e-5,)),
    (ON_POLICY, "on_forward", (3e-5,)),
    (ON_POLICY, "on_jsd", (3e-5, 1e-4)),
    (ON_POLICY, "on_reverse_bare", (3e-5,)),
    (PROBLEMS, "ce", (2e-4, 4e-4, 8e-4)),
    (PROBLEMS, "chain", (1e-4, 2e-4, 4e-4)),
    (PROBLEMS, "chain_adaptive", (1e-4, 2e-4, 4e-4)),
    (PROBLEMS, "chain_shots", (2e-4, 4e-4)),
    (PROBLEMS, "chain_fading", (2e-4,)),
    (TO_GEMMA, "ce", (1e-5,)),
    (TO_GEMMA, "chain_adaptive", (2e-5,)),
    (GERMAN, "p_kl_scaled", (1.6e-3,)),
    (PROBLEMS, "p_kl_scaled", (4e-4,)),
    (TWO_TEXTS, "chain_routed_twice", (4e-4,)),
    (TWO_TEXTS, "chain_routed", (8e-4,)),
    (TWO_TEXTS, "chain_second", (8e-4,)),
    (TWO_TEXTS, "chain", (8e-4,)),
    (START, "ce", (2e-4,)),
    (INSTRUCTIONS, "on_after", (1e-4, 3e-5)),
    *((INSTRUCTIONS, method, (1e-4, 2e-4)) for method in ("ce", "chain_adaptive")),
    (INSTRUCTIONS, "on_jsd", (1e-4,)),
    *((FEW, method, (5e-5, 1e-4)) for method in ("ce", "chain_adaptive")),
    (FEW, "on_after", (1e-4, 3e-5)),
    (FOR_GEMMA, "on_after", (3e-5,)),
    (FOR_GEMMA, "ce", (5e-5, 1e-4)),
    (FOR_GEMMA, "chain_adaptive", (5e-5,)),
    (FOR_GEMMA, "on_after", (1e-4,)),
    *((AGAIN, method, (3e-5,)) for method in _CONTINUED),
    (FEW_COLD, "ce", (START_RATE,)),
    *((FEW_ON, method, (3e-5, 1e-4)) for method in _CONTINUED),
    (PART_COLD, "ce", (START_RATE,)),
    *((PART_ON, method, (1e-4, 3e-5 if method == "ce" else 2e-4)) for method in _CONTINUED[1:]),
    (MID_COLD, "ce", (START_RATE,)),
    *((MID_ON, method, (1e-4, 3e-5 if method == "ce" else 2e-4)) for method in _CONTINUED[1:-1]),
    *((MID_ON, method, (1e-4,)) for method in _DRAWN),
    (MID_LONG, "on_jsd_sharp", (1e-4, 2e-4)),
    *((MID_LONG, method, (1e-4,)) for method in ("chain_shots", "ce")),
    *((f"{name}-cold", "ce", (START_RATE,)) for name in ORDER_SIZES),
    *(
        (f"{name}-on", method, (1e-4, 3e-5 if method == "ce" else 2e-4))
        for name in ORDER_SIZES
        for method in _CONTINUED[1:-1]
    ),
    *((name, method, (1e-4,)) for name in (MID_ALL, ORDERS_ALL) for method in ("on_jsd_sharp", "ce")),
    (ALONE_COLD, "ce", (START_RATE,)),
    *((ALONE_ON, method, (1e-4, 3e-5 if method == "ce" else 2e-4)) for method in _ALONE),
    (PART_LONG, "on_jsd_sharp", (2e-4, 4e-4, 1e-4)),
    (PART_LONG, "chain_shots", (1e-4, 2e-4)),
    (PART_LONG, "ce", (3e-5, 1e-4)),
    *((PART_LONG, method, (3e-5,)) for method in ("on_jsd_bare_sharp", "on_jsd_bare", "on_reverse_bare")),
    *((name, "on_after_sharp", (1e-4, 3e-5)) for name in (INSTRUCTIONS, FEW)),
)
"""Condition, method with its first weights, and learning rates, on the first data seed."""
OTHER_SEEDS = (
    (TWO_TEXTS, "chain_routed", 4e-4), (TWO_TEXTS, "chain", 4e-4), (TWO_TEXTS, "chain_both", 4e-4),
    (TWO_TEXTS, "chain_second", 4e-4), (PROBLEMS, "chain", 4e-4),
    (PYTHON, "ce", 1e-4), (PYTHON, "ce", 5e-5), (PYTHON, "chain_adaptive", 2e-4),
    (GERMAN, "ce", 4e-4), (GERMAN, "chain_adaptive", 8e-4),
    (FRENCH, "ce", 4e-4), (FRENCH, "chain_adaptive", 8e-4),
    (GERMAN, "p_kl_scaled", 8e-4), (PYTHON, "p_kl_scaled", 1e-4),
    (COLD_START, "ce", START_RATE), (COLD_NO_END, "ce", START_RATE), (ON_POLICY, "on_jsd", 3e-5),
    (PROBLEMS, "ce", 4e-4), (PROBLEMS, "chain_shots", 2e-4),
    (PROBLEMS, "chain_adaptive", 2e-4), (START, "ce", 2e-4), (FEW_COLD, "ce", START_RATE),
    *((AGAIN, method, 3e-5) for method in _CONTINUED),
    *((FEW_ON, method, None) for method in _CONTINUED),
    (PART_COLD, "ce", START_RATE), *((PART_ON, method, None) for method in _CONTINUED[1:]),
    (MID_COLD, "ce", START_RATE), *((MID_ON, method, None) for method in (*_CONTINUED[1:-1], *_DRAWN)),
    *((f"{name}-cold", "ce", START_RATE) for name in ORDER_SIZES),
    *((f"{name}-on", method, None) for name in ORDER_SIZES for method in _CONTINUED[1:-1]),
    (MID_ALL, "on_jsd_sharp", 1e-4), (ORDERS_ALL, "on_jsd_sharp", 1e-4),
    (ALONE_COLD, "ce", START_RATE), *((ALONE_ON, method, None) for method in _ALONE),
    *((name, method, None) for name in (MID_LONG, PART_LONG) for method in ("on_jsd_sharp", "chain_shots", "ce")),
    *(
        (name, method, None)
        for name in (INSTRUCTIONS, FEW)
        for method in ("on_after", "ce", "chain_adaptive", "on_after_sharp")
    ),
)  # fmt: skip
"""What runs on the other data seeds, at the rates that were best on the first one: before what is new on it. None is
the rate with the most right answers there."""
SEEDS_OF = {TWO_TEXTS: SEEDS[:2]}
"""Conditions that have fewer data seeds than the others."""
GIB = {"": 26.0, GEMMA3: 20.0, QWEN15: 23.5}
"""GPU memory of a run by its teacher, as seen at its end; without one its micro-batches are larger."""
UNKNOWN_GIB = 26.0
PROBLEMS_GIB, ROLLOUT_GIB = (9.0, 14.0), 3.0
"""Of word problems without and with a teacher, and of a rollout worker."""
STUDENT_GIB = {GEMMA3: 12.0, QWEN05: 14.0}
"""What a larger student than SmolLM2 takes beside that."""
TWO_TEXTS_GIB = {GERMAN_TEACHER: 14.0, TWO_TEXTS: 14.0}
"""Of what is not compiled, with small micro-batches."""


def planned(result: Mapping[str, Any]) -> list[Cell]:
    """Return the planned runs, the important ones first; without those whose rate is not known yet.

    Args:
        result: Content of the result file.
    """
    first = [(condition, method, rate, SEEDS[0]) for condition, method, rates in PLAN for rate in rates]
    others = [(*each, seed) for seed in SEEDS[1:] for each in OTHER_SEEDS if seed in SEEDS_OF.get(each[0], SEEDS)]
    return [
        Cell(condition, method, METHODS[method].first_weight, found, seed)
        for condition, method, rate, seed in (*others, *first)
        if (found := rate or best_rate(result, condition, method)) is not None
    ]


def best_rate(result: Mapping[str, Any], condition: str, method: str) -> float | None:
    """Return the learning rate of a method with the most right answers at the last step, on the first data seed."""
    key = f"{TASK}{CONDITIONS[condition].task}"
    runs = [
        run
        for run in result["runs"]
        if (run["condition"], run["method"], run["seed"]) == (condition, method, SEEDS[0]) and key in run["curve"][-1]
    ]
    best = max(runs, key=lambda run: run["curve"][-1][key], default=None)
    return None if best is None else float(best["rate"])


def planned_rates(condition: str, method: str) -> tuple[float, ...]:
    """Return the learning rates of a method in the plan, in order; all of the condition's where it has none."""
    found = sorted({rate for *key, rates in PLAN if key == [condition, method] for rate in rates})
    return tuple(found) or CONDITIONS[condition].rates


def gib_of(cell: Cell) -> float:
    """Return the GPU memory that is set aside for a run, in GiB."""
    method = METHODS[cell.method]
    if cell.condition in TWO_TEXTS_GIB:
        return TWO_TEXTS_GIB[cell.condition]
    more = STUDENT_GIB.get(CONDITIONS[cell.condition].student, 0.0)
    if CONDITIONS[cell.condition].source in ANSWERED:  # short rows
        return PROBLEMS_GIB[method.teachers > 0] + method.on_policy * ROLLOUT_GIB + more
    teacher = Path(next(iter(teachers_of(cell)), "")).name
    return GIB.get(teacher, UNKNOWN_GIB) + more


def has_models(state: Path, cell: Cell) -> bool:
    """Return True if the run's student, teachers and texts are there."""
    texts = all((state / "texts" / f"{source}.train.jsonl").is_file() for source in cell.texts)
    return texts and all((state / model).is_dir() for model in (student_of(cell), *teachers_of(cell)))
