"""The benchmark of kills and of a resumed run: a bad result does not hold."""

from typing import Any

import pytest

from benchmarks.bounds import resume_bounds
from benchmarks.worker_kills.__main__ import LIMIT, Outcome
from benchmarks.worker_kills.whole_run import RUNS, verdict

GOOD = {"victim": "trainer-0", "paired": True, "step": 3, "reported_s": 1.0, "paired_s": 4.0}


def test_nothing_lost_and_everything_told_holds() -> None:
    assert Outcome("cpu", 2, 1, kills=[GOOD, {**GOOD, "paired": False, "reported_s": None}]).holds()


@pytest.mark.parametrize(
    "change",
    [
        {"kills": [{**GOOD, "reported_s": None}]},
        {"kills": [{**GOOD, "reported_s": 99.0}]},
        {"used_at_end": LIMIT + 1},
        {"used_after_rounds": [2 * LIMIT + 2]},
        {"errors": ["ids"]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_must_not_be_does_not_hold(change: dict[str, Any]) -> None:
    assert not Outcome("cpu", 2, 1, **{"kills": [GOOD], **change}).holds()


def lines(offset: float, ids: list[int]) -> list[dict[str, Any]]:
    return [{"ids": [i], "loss": 1.0 + offset} for i in ids]


@pytest.mark.parametrize(
    ("offset", "ids", "good"), [(1e-6, [0, 1, 2], True), (1e-3, [0, 1, 2], False), (1e-6, [0, 2, 1], False)]
)
def test_a_resumed_run_is_held_to_its_noise_and_its_ids(offset: float, ids: list[int], good: bool) -> None:
    order = [0, 1, 2]
    found = verdict(dict(zip(RUNS, (lines(0.0, order), lines(1e-6, order), lines(offset, ids)), strict=True)))
    bounds = resume_bounds({**found, "kills": [GOOD], "memory_not_returned": 0, "memory_limit": 1, "deadline_s": 2.0})
    assert all(bound.holds for bound in bounds) is good
