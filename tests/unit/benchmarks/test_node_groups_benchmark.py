"""The benchmark of node groups: a bad result does not hold."""

from typing import Any

from benchmarks.node_groups.__main__ import LIMIT, holds
from tests.support.cases import cases

GOOD: dict[str, Any] = {
    "state": "completed", "ids_exact": True, "same_ids_in_every_step": True, "steps": 4, "expected_steps": 4,
    "deviation": {"loss": LIMIT / 2}, "killed": "node1-trainer", "restarts": {"node1-trainer": 1},
}  # fmt: skip


def test_a_run_that_came_back_with_the_same_losses_holds() -> None:
    assert holds(GOOD)


@cases(
    "change",
    {"state": "failed"},
    {"error": "TimeoutError"},
    {"ids_exact": False},
    {"same_ids_in_every_step": False},
    {"steps": 3},
    {"deviation": {"loss": 2 * LIMIT}},
    {"deviation": {"loss": float("nan")}},
    {"deviation": {"loss": None}},
    {"restarts": {"node1-trainer": 0}},
    {"killed": None},
    ids=str,
)
def test_any_other_does_not(change: dict[str, Any]) -> None:
    assert not holds({**GOOD, **change})
