"""Activities of workers on the console, and the estimate of a run's remaining time."""

from typing import Any

from tests.unit.supervisor.test_progress import WORKER
from tests.unit.supervisor.test_progress import status as status_of
from xtoken_services.common.run.status import RunStatus
from xtoken_services.supervisor.progress import status_line

LOADING = WORKER | {"phase": "load", "activity": ""}


def status(**changes: Any) -> RunStatus:
    start = {"step": 0, "steps": 10, "last": None, "evaluation": None, "queue": None, "spec": {"eval": {"every": 4}}}
    return status_of(**start | {"workers": [LOADING]} | changes)


def test_an_evaluation_is_counted_and_shown() -> None:
    evaluating = LOADING | {"activity": "evaluating: 40%"}
    line = status_line(status(workers=[evaluating]))
    assert "trainer-0 evaluating: 40%" in line and "to load" not in line
    loading = status_line(status(workers=[LOADING | {"activity": "loading the student"}]))
    assert "waiting for trainer-0 (loading the student) to load" in loading
    assert (
        status_line(status(steps=None, state="starting", checking="building tables", workers=[]))
        == "tiny: starting, building tables"
    )


def test_remaining_time_has_steps_and_evaluations() -> None:
    assert status().remaining_s() is None
    evaluated = {"step": 4, "seconds": 30.0}
    assert status(step=5, last={"seconds": 2.0}, evaluation=evaluated).remaining_s() == 5 * 2.0 + 2 * 30.0
    assert status(step=4, evaluation=evaluated).evaluations_left == 2
    assert status().evaluations_left == 4
    assert status(step=10, evaluation={"step": 10}).evaluations_left == 0
    recent = [{"seconds": 1.0}, {"seconds": 3.0}]
    assert status(step=8, spec={}).remaining_s(recent) == 4.0
