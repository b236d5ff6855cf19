"""Read-only requests send none to a worker or the queue."""

import time
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.waiting import until
from tests.unit.control.stored_runs import HERE
from tests.unit.supervisor.scripted_run import resolved_run, use_scripted_workers
from xtoken_core.data_plane.queue_client import QueueClient
from xtoken_services.control.app import create_app
from xtoken_services.control.runs import Runs
from xtoken_services.supervisor import os_process
from xtoken_services.supervisor.supervisor import POLL_S

STEPS, HELD = 8, 4
ROUNDS = 30


def test_reading_sends_no_requests_to_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count all requests of this process to the queue, which is its only way to the workers."""
    state = tmp_path / "state"
    state.mkdir()
    sent: list[str] = []
    for name in ("hello", "stats", "list_samples"):
        monkeypatch.setattr(QueueClient, name, counted(getattr(QueueClient, name), name, sent))
    use_scripted_workers(state, STEPS, monkeypatch.setattr, trainer_0=[f"step{HELD}:always await go"])
    runs = Runs(tmp_path / "runs")
    try:
        _, row = runs.start(resolved_run(tmp_path / "runs" / "one", STEPS).spec)
        client = TestClient(create_app(runs), base_url=HERE)
        path = f"/v1/runs/{row.id}"
        until(lambda: client.get(path).json()["step"] == HELD)
        began, before = time.monotonic(), len(sent)
        ways = ["", "/metrics", "/notes", "/logs", "/logs/files", "/artifacts"]
        for _ in range(ROUNDS):
            answers = [client.get(path + way) for way in ways] + [client.get("/v1/runs"), client.get("/metrics")]
            assert {answer.status_code for answer in answers} == {200}
        looks = (time.monotonic() - began) / POLL_S + 2
        assert len(sent) - before <= 3 * looks, "a look is one `stats` and two `list_samples`"
        assert set(sent[before:]) <= {"stats", "list_samples"}, "no new connection"
        (state / "go").touch()
        until(lambda: client.get(path).json()["state"] == "completed")
    finally:
        runs.stop_all(now=True)
        runs.join()
        runs.close()
    assert os_process.marked(f"{row.id}/") == []


def counted(method: Any, name: str, sent: list[str]) -> Any:
    """Return the method, wrapped to record its calls."""

    def counting(self: Any, *arguments: Any, **options: Any) -> Any:
        sent.append(name)
        return method(self, *arguments, **options)

    return counting
