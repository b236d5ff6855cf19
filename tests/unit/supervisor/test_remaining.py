"""Activities of workers on the console, and the estimate of a run's remaining time."""

from __future__ import annotations

from typing import Any

from xtoken_services.supervisor.progress import status_line
from xtoken_services.supervisor.remaining import evaluations_left, remaining_s

WORKER = {"name": "trainer-0", "kind": "trainer", "state": "running", "phase": "load", "restarts": 0, "activity": ""}


def status(**changes: Any) -> dict[str, Any]:
    return {
        "name": "tiny", "state": "running", "output": "/runs/tiny", "step": 0, "steps": 10, "last": None,
        "evaluation": None, "queue": None, "workers": [WORKER], "spec": {"eval": {"every": 4}}, **changes,
    }  # fmt: skip


def test_an_evaluation_is_counted_and_shown() -> None:
    evaluating = WORKER | {"activity": "evaluating: 40%"}
    line = status_line(status(workers=[evaluating]))
    assert "trainer-0 evaluating: 40%" in line and "to load" not in line
    loading = status_line(status(workers=[WORKER | {"activity": "loading the student"}]))
    assert "waiting for trainer-0 (loading the student) to load" in loading
    assert (
        status_line(status(steps=None, state="starting", checking="building tables", workers=[]))
        == "tiny: starting, building tables"
    )


def test_remaining_time_has_steps_and_evaluations() -> None:
    assert remaining_s(status()) is None
    evaluated = {"step": 4, "seconds": 30.0}
    assert remaining_s(status(step=5, last={"seconds": 2.0}, evaluation=evaluated)) == 5 * 2.0 + 2 * 30.0
    assert evaluations_left(status(evaluation=evaluated), 4, 10) == 2
    assert evaluations_left(status(), 0, 10) == 4
    assert evaluations_left(status(evaluation={"step": 10}), 10, 10) == 0
    recent = [{"seconds": 1.0}, {"seconds": 3.0}]
    assert remaining_s(status(step=8, spec={}), recent) == 4.0
