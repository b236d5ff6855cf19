"""The HTTP interface, as far as it goes without a run: refusals, and runs of earlier control planes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from services.control import processes
from services.control.access import MAX_BODY_BYTES, is_loopback
from services.control.app import create_app
from services.control.record import write_record
from services.control.runs import INDEX, Runs

JSON = {"content-type": "application/json"}


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "runs")


@pytest.fixture
def client(runs: Runs) -> Iterator[TestClient]:
    with TestClient(create_app(runs), base_url="http://127.0.0.1:8400") as found:
        yield found


def spec(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    model = {"model": str(tmp_path / "model"), "context_length": 8}
    teacher = {**model, "projection": str(tmp_path / "projection.pt")}
    data = {"path": str(tmp_path / "data.txt")}
    return {"output": "out", "student": model, "teacher": teacher, "data": data, **changes}


def test_health(client: TestClient, runs: Runs) -> None:
    assert client.get("/livez").json() == {"live": True}
    assert client.get("/readyz").json() == {"ready": True, "stuck": {}}


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"student": {"model": "/m"}}, "student.context_length", "Field required"),
        ({"colour": "red"}, "colour", "Extra inputs are not permitted"),
        ({"train": {"samples_per_step": 0}}, "train.samples_per_step", "greater than or equal to 1"),
        ({"queue": {"block_size": 5}}, "the run", "queue.block_size = 5 must divide"),
    ],
)
def test_a_refused_field_is_named(
    client: TestClient, tmp_path: Path, changes: dict[str, Any], field: str, message: str
) -> None:
    answer = client.post("/v1/runs", json=spec(tmp_path, **changes))
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert [error["field"] for error in problem["errors"]] == [field]
    assert message in problem["errors"][0]["message"]
    assert problem["detail"].startswith(f"{field}: ") and problem["exit_code"] == 2
    assert client.get("/v1/runs").json() == {"runs": []}


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({}, "no_model"),
        ({"data": {"path": "data.txt"}}, "data.path: data.txt is relative: a control plane takes absolute paths"),
        ({"teacher": [{"model": "/m", "projection": "p", "context_length": 8}]}, "teacher.0.projection: p is relative"),
    ],
    ids=["missing model", "relative data", "relative projection"],
)
def test_unfit_files_are_refused_and_the_run_forgotten(
    client: TestClient, tmp_path: Path, changes: dict[str, Any], detail: str
) -> None:
    body = spec(tmp_path, **changes)
    if detail == "no_model":
        detail = f"cannot read the student's model: {tmp_path / 'model' / 'config.json'}"
    answer = client.post("/v1/runs", json=body)
    assert answer.status_code == 422, answer.text
    assert detail in answer.json()["detail"]
    assert client.get("/v1/runs").json() == {"runs": []}


def test_a_directory_that_cannot_be_made(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    answer = client.post("/v1/runs", json=spec(tmp_path, output=str(tmp_path / "file" / "out")))
    assert answer.status_code == 422
    assert f"cannot make the output directory {tmp_path / 'file' / 'out'}" in answer.json()["detail"]


@pytest.mark.parametrize("path", ["/v1/runs/none", "/v1/runs/none/metrics", "/v1/runs/..%2f..%2fetc", "/nowhere"])
def test_what_is_not_there(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.json()["status"] == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:8400"}, 403),
        ({"host": "192.168.1.7:8400"}, 403),
        ({"host": "["}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:8400"}, 200),
        ({"host": "localhost"}, 200),
        ({"host": "[::1]:8400"}, 200),
    ],
    ids=str,
)
def test_foreign_names_and_pages_are_refused(client: TestClient, headers: dict[str, str], status: int) -> None:
    assert client.get("/v1/runs", headers=headers).status_code == status


def test_a_body_too_long_is_refused(client: TestClient) -> None:
    assert client.post("/v1/runs", content=b" " * (MAX_BODY_BYTES + 1), headers=JSON).status_code == 413


def test_a_body_that_hides_its_length_is_refused_too(client: TestClient) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(MAX_BODY_BYTES // (1 << 16) + 2):
            yield b" " * (1 << 16)

    answer = client.post("/v1/runs", content=endless(), headers=JSON)
    assert 400 <= answer.status_code < 500


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'"x"', b"[" * 100_000])
def test_garbage_is_no_server_error(client: TestClient, body: bytes) -> None:
    assert client.post("/v1/runs", content=body, headers=JSON).status_code in (400, 422)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_addresses_of_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org", ""])
def test_addresses_that_others_reach(host: str) -> None:
    assert not is_loopback(host)


def remembered(runs: Runs, output: Path, record: dict[str, Any]) -> None:
    output.mkdir()
    write_record(output, record)
    (output / "steps.jsonl").write_text('{"step":0,"loss":2.0,"ids":[1]}\n{"step":1,"loss":1.0,"ids":[2]}\n')
    (output / "summary.json").write_text('{"trained": 2}')
    entry = {"id": "old-1", "name": "old", "output": str(output), "created": "2026-01-01T00:00:00+00:00"}
    assert runs.directory is not None
    (runs.directory / INDEX / "old-1.json").write_text(json.dumps(entry))


def test_a_run_of_an_earlier_control_plane(client: TestClient, runs: Runs, tmp_path: Path) -> None:
    remembered(runs, tmp_path / "old", {"state": "completed", "error": "", "exit_code": 0})
    assert [run["id"] for run in client.get("/v1/runs").json()["runs"]] == ["old-1"]
    shown = client.get("/v1/runs/old-1").json()
    assert (shown["state"], shown["last"], shown["summary"]) == ("completed", {"step": 1, "loss": 1.0}, {"trained": 2})
    assert client.get("/v1/runs/old-1/metrics", params={"after": 0}).json() == {
        "steps": [{"step": 1, "loss": 1.0}], "eval": [],
    }  # fmt: skip
    assert client.post("/v1/runs/old-1/stop").json()["state"] == "completed"
    assert client.get("/v1/runs/old-1/metrics", params={"limit": 0}).status_code == 422


def test_a_run_whose_control_plane_was_killed_has_failed(client: TestClient, runs: Runs, tmp_path: Path) -> None:
    gone = {"pid": os.getpid(), "created": 1.0}
    remembered(runs, tmp_path / "old", {"state": "running", "error": "", "supervisor": gone})
    shown = client.get("/v1/runs/old-1").json()
    assert shown["state"] == "failed" and "its control plane has ended" in shown["error"]


def test_a_run_that_another_control_plane_holds(client: TestClient, runs: Runs, tmp_path: Path) -> None:
    lives = {"pid": os.getpid(), "created": processes.created(os.getpid())}
    remembered(runs, tmp_path / "old", {"state": "running", "error": "", "supervisor": lives})
    assert client.get("/v1/runs/old-1").json()["state"] == "running"
    assert client.post("/v1/runs/old-1/stop").status_code == 409
