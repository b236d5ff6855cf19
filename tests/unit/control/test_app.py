"""HTTP API without starting a run: validation errors, and runs that are over."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.cases import cases
from tests.unit.control.stored_runs import HERE, put, spec
from xtoken_services.common.run.status import RunState
from xtoken_services.control.app import create_app
from xtoken_services.control.http_limits import MAX_BODY_BYTES
from xtoken_services.control.runs import Runs

JSON = {"content-type": "application/json"}


@pytest.fixture
def client(runs: Runs) -> Iterator[TestClient]:
    with TestClient(create_app(runs), base_url=HERE, raise_server_exceptions=False) as found:
        yield found


def test_health(client: TestClient, runs: Runs) -> None:
    assert client.get("/livez").json() == {"live": True}
    assert client.get("/readyz").json()["ready"] is True
    assert 0 <= client.get("/readyz").json()["age_s"] < 30


def test_readiness_without_database(client: TestClient, runs: Runs) -> None:
    runs.store.close()
    runs.store.counts = broken  # type: ignore[method-assign]
    runs.housekeeping_at -= 60
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["age_s"] >= 60 and "the database has not responded" in answer.json()["reason"]


def test_readiness_at_a_full_disk(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, (1 << 30) - 4096, 4096))  # type: ignore[attr-defined]
    answer = client.get("/readyz")
    assert answer.status_code == 503 and answer.json()["reason"] == "the disk of the runs is full"


@pytest.mark.parametrize("path", ["/", "/livez", "/v1/runs", "/v1/none", "/metrics", "/openapi.json", "/static/none"])
def test_no_answer_s_type_is_guessed(client: TestClient, path: str) -> None:
    for headers in ({}, {"host": "evil.example"}):
        assert client.get(path, headers=headers).headers["X-Content-Type-Options"] == "nosniff"


def test_readiness_with_an_emptied_database(client: TestClient, runs: Runs) -> None:
    os.truncate(runs.directory / ".control.sqlite3", 0)
    until = time.monotonic() + 30
    while (answer := client.get("/readyz")).status_code == 200 and time.monotonic() < until:
        time.sleep(0.05)
    assert answer.status_code == 503 and ".control.sqlite3 is empty" in answer.json()["reason"]


def broken() -> dict[str, int]:
    from xtoken_services.control.store import StoreError

    raise StoreError("the disk is gone")


@cases(
    "changes, field, message",
    ({"student": {"context_length": 8}}, "student.model", "field required"),
    ({"student": {"model": "/m"}}, "student.model", "lies under none of this control plane's roots"),
    ({"student": {"model": "../m"}}, "student.model", "../m lies under none of this control plane's roots"),
    ({"train": {"lr": 1}}, "train.lr", "there is no such field; did you mean learning_rate?"),
    ({"train": {"samples_per_step": 0}}, "train.samples_per_step", "greater than or equal to 1"),
    ({"queue": {"block_size": 5}}, "the run", "queue.block_size = 5 must divide"),
    (
        {"student": {"model": "/m", "context_length": 8, "trust_remote_code": True}},
        "student.trust_remote_code",
        "there is no such field; there are blockwise_head, chat_template, ",
    ),
    ({"workers": {"collators": 10**6}}, "workers.collators", "1000000 is larger than 256"),
    ({"train": {"max_steps": 10**30}}, "train.max_steps", "is larger than"),
    ({"ray": {"address": "elsewhere:6379"}}, "ray.address", "the cluster of its own machine"),
    ({"output": "../out"}, "output", "contains '..'"),
    ({"output": ".hidden"}, "output", "hidden"),
    ({"output": "a\0b"}, "output", "control characters"),
    ({"output": "x" * 5000}, "output", "longer than"),
    ({"output": "."}, "output", "must be a directory below"),
    ({"output": "/tmp/elsewhere"}, "output", "is written: it must lie below"),
    ({"data": {"path": "../data.txt"}}, "data.path", "../data.txt lies under none of this control plane's roots"),
    ({"data": {"path": "/etc/passwd"}}, "data.path", "lies under none of this control plane's roots"),
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("dry", [False, True], ids=["start", "dry run"])
def test_validation_error(
    client: TestClient, tmp_path: Path, changes: dict[str, Any], field: str, message: str, dry: bool
) -> None:
    answer = client.post("/v1/runs", json=spec(tmp_path, **changes), params={"dry_run": dry})
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert [error["field"] for error in problem["errors"]] == [field]
    assert message in problem["errors"][0]["message"]
    assert problem["detail"].startswith(f"{field}: ") and problem["exit_code"] == 2
    assert client.get("/v1/runs").json() == {"runs": [], "next": None}


def test_invalid_files_leave_no_run(client: TestClient, tmp_path: Path) -> None:
    for params in ({}, {"dry_run": True}):
        answer = client.post("/v1/runs", json=spec(tmp_path), params=params)
        assert answer.status_code == 422, answer.text
        assert f"cannot read the student's model: {tmp_path / 'data' / 'model'}" in answer.json()["detail"]
        assert client.get("/v1/runs").json()["runs"] == []
        assert not (tmp_path / "runs" / "out").exists()


@cases(
    "link, target, changes, field",
    ("data/link.txt", "secret", {"data": {"path": "data/link.txt"}}, "data.path"),
    (None, None, {"data": {"path": "data/../secret"}}, "data.path"),
    ("data/model/config.json", "secret", {}, "student.model"),
    ("data/model/weights", "other", {}, "student.model"),
    ("runs/out", "elsewhere", {}, "output"),
    ("runs/up", ".", {"output": "up/out"}, "output"),
    ids=["file", "dots", "file of a model", "directory of a model", "output", "parent of the output"],
)
def test_links_out_of_the_roots(
    client: TestClient, tmp_path: Path, link: str | None, target: str, changes: dict[str, Any], field: str
) -> None:
    (tmp_path / "secret").write_text("secret")
    if link:
        (tmp_path / link).parent.mkdir(exist_ok=True)
        (tmp_path / link).symlink_to(tmp_path / target)
    if "data" in changes:
        changes = {"data": {"path": str(tmp_path / changes["data"]["path"])}}
    answer = client.post("/v1/runs", json=spec(tmp_path, **changes))
    assert (answer.status_code, [error["field"] for error in answer.json()["errors"]]) == (422, [field]), answer.text
    assert not (tmp_path / "elsewhere").exists()


def test_output_conflicts(client: TestClient, runs: Runs, tmp_path: Path) -> None:
    output = put(runs)
    answer = client.post("/v1/runs", json=spec(tmp_path, output="old-1"))
    assert (answer.status_code, answer.json()["run"]) == (409, "old-1")
    assert client.post("/v1/runs", json=spec(tmp_path, output="old-1/inner")).status_code == 409
    (output.parent / "full").mkdir()
    (output.parent / "full" / "file").touch()
    answer = client.post("/v1/runs", json=spec(tmp_path, output="full"))
    assert answer.status_code == 422 and "is not empty" in answer.json()["detail"]


def test_idempotency_key(client: TestClient, runs: Runs, tmp_path: Path) -> None:
    from xtoken_core.config.spec import RunSpec
    from xtoken_services.control.runs import _digest

    body = spec(tmp_path)
    put(runs, key="k", digest=_digest(RunSpec.model_validate(body)))
    again = client.post("/v1/runs", json=body, headers={"Idempotency-Key": "k"})
    assert (again.status_code, again.json()["id"]) == (200, "old-1")
    other = client.post("/v1/runs", json=spec(tmp_path, seed=1), headers={"Idempotency-Key": "k"})
    assert other.status_code == 409 and "was used with another specification" in other.json()["detail"]
    assert client.post("/v1/runs", json=body, headers={"Idempotency-Key": "x" * 300}).status_code == 422


@pytest.mark.parametrize("path", ["/v1/runs/none", "/v1/runs/none/metrics", "/v1/runs/none/artifacts/a", "/nowhere"])
def test_not_found(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.json()["status"] == 404


def test_body_too_large(client: TestClient) -> None:
    assert client.post("/v1/runs", content=b" " * (MAX_BODY_BYTES + 1), headers=JSON).status_code == 413


def test_chunked_body_too_large(client: TestClient) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(MAX_BODY_BYTES // (1 << 16) + 2):
            yield b" " * (1 << 16)

    assert client.post("/v1/runs", content=endless(), headers=JSON).status_code == 413


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'"x"', b"[" * 4_000, b'{"seed": ' + b"1" * 5000 + b"}"])
def test_malformed_body(client: TestClient, body: bytes) -> None:
    assert client.post("/v1/runs", content=body, headers=JSON).status_code in (400, 422)


@cases(
    "changes, named",
    ({"student": "\ud800"}, "student.model: "),
    ({"teacher": ["\ud800"]}, "teacher.0.model: "),
    ({"loss": {"mode": ["chain"]}}, "loss.mode: "),
    ({"loss": {"teacher_modes": [{"a": 1}]}}, "loss.teacher_modes.0: "),
)
def test_values_of_a_wrong_kind_are_named(
    client: TestClient, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    body = json.dumps(spec(tmp_path, **changes))  # escapes half a surrogate pair
    for path in ("/v1/runs", "/v1/runs?dry_run=true"):
        answer = client.post(path, content=body, headers=JSON)
        assert answer.status_code == 422 and answer.json()["detail"].startswith(named), answer.text


def test_list_runs_by_page(client: TestClient, runs: Runs) -> None:
    for number in range(7):
        put(runs, f"r-{number}", RunState.STOPPED if number % 2 else RunState.COMPLETED)
    seen, cursor = [], None
    while True:
        page = client.get("/v1/runs", params={"limit": 3, **({"cursor": cursor} if cursor else {})}).json()
        seen += [run["id"] for run in page["runs"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert seen == [f"r-{number}" for number in reversed(range(7))]
    stopped = client.get("/v1/runs", params={"state": "stopped"}).json()["runs"]
    assert [run["id"] for run in stopped] == ["r-5", "r-3", "r-1"]
    assert client.get("/v1/runs", params={"state": "lost"}).status_code == 422
    assert client.get("/v1/runs", params={"name": "other"}).json()["runs"] == []


def test_show_finished_run(client: TestClient, runs: Runs) -> None:
    put(runs)
    shown = client.get("/v1/runs/old-1").json()
    assert (shown["state"], shown["last"], shown["summary"]) == ("completed", {"step": 1, "loss": 1.0}, {"trained": 2})
    assert [(w["name"], w["state"], w["exit_code"]) for w in shown["workers"]] == [("trainer-0", "stopped", 0)]
    assert client.post("/v1/runs/old-1/stop").json()["state"] == "completed"
    assert client.post("/v1/runs/old-1/resume").status_code == 409
    curves = client.get("/v1/runs/old-1/metrics", params={"after": 0}).json()
    assert curves == {"steps": [{"step": 1, "loss": 1.0}], "eval": [], "steps_total": 2, "eval_total": 0}
    assert client.get("/v1/runs/old-1/metrics", params={"points": 0}).status_code == 422


def test_response_with_many_errors(client: TestClient) -> None:
    answer = client.post("/v1/runs", json={f"k{number}": 1 for number in range(1000)})
    assert answer.status_code == 422 and len(answer.json()["errors"]) == 50 and len(answer.content) < 30_000
    assert answer.json()["detail"].endswith("; and 952 more errors")


def test_logs(client: TestClient, runs: Runs) -> None:
    put(runs)
    merged = client.get("/v1/runs/old-1/logs").text.splitlines()
    assert [line.split(" INFO ")[-1] for line in merged] == ["one", "two", "queue |   and more", "three"]
    assert client.get("/v1/runs/old-1/logs", params={"worker": "trainer-0", "tail": 1, "follow": True}).text == (
        "2026-01-01T00:00:03Z INFO three\n"
    )
    assert client.get("/v1/runs/old-1/logs", params={"worker": "trainer-0", "attempt": 2}).status_code == 404
    assert client.get("/v1/runs/old-1/logs", params={"worker": "../../run"}).status_code == 404
    files = client.get("/v1/runs/old-1/logs/files").json()
    assert [(item["worker"], item["attempt"]) for item in files] == [("queue", 1), ("trainer-0", 1)]


def test_artifacts(client: TestClient, runs: Runs) -> None:
    put(runs)
    listed = client.get("/v1/runs/old-1/artifacts").json()
    assert "steps.jsonl" in [item["path"] for item in listed["artifacts"]] and not listed["truncated"]
    assert client.get("/v1/runs/old-1/artifacts/summary.json").json() == {"trained": 2}
    part = client.get("/v1/runs/old-1/artifacts/summary.json", headers={"Range": "bytes=1-9"})
    assert (part.status_code, part.text) == (206, '"trained"')


def test_artifacts_outside_the_directory(client: TestClient, runs: Runs, tmp_path: Path) -> None:
    output = put(runs)
    (tmp_path / "secret").write_text("secret")
    (output / "link").symlink_to(tmp_path / "secret")
    (output / "up").symlink_to(tmp_path)
    (output / ".hidden").write_text("hidden")
    (output / "cache").mkdir()
    (output / "cache" / "index").write_text("index")
    paths = ["link", "up/secret", ".hidden", "cache/index", "logs", "", "..%2f..%2fsecret", "%2e%2e/%2e%2e/secret",
             "logs/../../../secret", "%2fetc%2fpasswd", "a%00b", "logs//queue.1.log"]  # fmt: skip
    for path in paths:
        answer = client.get(f"/v1/runs/old-1/artifacts/{path}")
        assert answer.status_code == 404 or answer.url.path.endswith("/artifacts"), path
        assert answer.text != "secret"
    listed = [item["path"] for item in client.get("/v1/runs/old-1/artifacts").json()["artifacts"]]
    assert not {"link", "up/secret", ".hidden", "cache/index"} & set(listed)


def test_remove_run(client: TestClient, runs: Runs) -> None:
    kept, gone = put(runs, "kept"), put(runs, "gone")
    assert client.delete("/v1/runs/kept").status_code == 204
    assert client.delete("/v1/runs/gone", params={"files": True}).status_code == 204
    assert kept.exists() and not gone.exists()
    assert client.get("/v1/runs").json()["runs"] == []
    assert client.delete("/v1/runs/kept").status_code == 404


def with_checkpoints(output: Path, *steps: int) -> Path:
    for step in steps:
        (output / f"checkpoints/step-{step:08d}").mkdir(parents=True)
        (output / f"checkpoints/step-{step:08d}/rank-0.safetensors").write_bytes(b"0")
    return output / "checkpoints"


def test_all_but_the_newest_and_the_best_checkpoint_are_freed(client: TestClient, runs: Runs) -> None:
    output = put(runs)
    assert client.delete("/v1/runs/old-1/checkpoints").json() == []
    checkpoints = with_checkpoints(output, 10, 20, 30, 40)
    (checkpoints / "best").symlink_to("step-00000020")
    answer = client.delete("/v1/runs/old-1/checkpoints")
    assert (answer.status_code, answer.json()) == (200, ["step-00000010", "step-00000030"])
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best", "step-00000020", "step-00000040"]
    assert (output / "steps.jsonl").is_file() and list((checkpoints / "step-00000020").iterdir())
    assert client.delete("/v1/runs/nothing/checkpoints").status_code == 404


@pytest.mark.parametrize("why", ["active", "another run's", "a link"])
def test_checkpoints_that_a_run_needs_or_does_not_own_are_kept(
    client: TestClient, runs: Runs, tmp_path: Path, why: str
) -> None:
    output = put(runs, state=RunState.RUNNING if why == "active" else RunState.STOPPED)
    checkpoints = with_checkpoints(output, 10, 20)
    if why == "another run's":
        (output / "run.json").write_text('{"run": "somebody-else"}')
    elif why == "a link":
        checkpoints.rename(tmp_path / "elsewhere")
        checkpoints.symlink_to(tmp_path / "elsewhere")
    assert client.delete("/v1/runs/old-1/checkpoints").status_code == 409
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000010", "step-00000020"]


def test_a_run_is_described_and_stays_so(client: TestClient, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    put(runs)
    living = SimpleNamespace(status=runs.store.run("old-1").status)  # as of its start, like that of a run under way
    for text in ("first", "twice the text\n<b>"):
        answer = client.put("/v1/runs/old-1/description", json=text)
        assert (answer.status_code, answer.json()["description"]) == (200, text)
    assert client.get("/v1/runs").json()["runs"][0]["description"] == text
    for wrong in ("x" * 4001, 7, None):
        assert client.put("/v1/runs/old-1/description", json=wrong).status_code == 422
    monkeypatch.setattr(runs, "get", lambda _: living)
    assert client.get("/v1/runs/old-1").json()["description"] == text
    assert client.put("/v1/runs/nothing/description", json=text).status_code == 404


def test_directory_of_another_run_is_kept(client: TestClient, runs: Runs) -> None:
    output = put(runs)
    (output / "run.json").write_text('{"run": "somebody-else"}')
    assert client.delete("/v1/runs/old-1", params={"files": True}).status_code == 409
    assert output.exists()


def test_prometheus_metrics(client: TestClient, runs: Runs) -> None:
    put(runs)
    client.get("/v1/runs/old-1")
    client.get("/v1/runs/scanned-for")
    text = client.get("/metrics").text
    assert 'xtoken_runs{state="completed"} 1.0' in text
    assert 'xtoken_control_requests_total{method="GET",route="/v1/runs/{run_id}",status="200"} 1.0' in text
    assert "scanned-for" not in text


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_files_of_a_hostile_run_directory(client: TestClient, runs: Runs, tmp_path: Path, kind: str) -> None:
    output = put(runs)
    (tmp_path / "secret").write_text("2026-01-01T00:00:09Z INFO secret\n")
    for name in ("logs/trainer-0.1.log", "steps.jsonl", "eval.jsonl", "summary.json", "run.json"):
        (output / name).unlink(missing_ok=True)
        os.mkfifo(output / name) if kind == "fifo" else (output / name).symlink_to(tmp_path / "secret")
    (output / "checkpoints" / "step-........").mkdir(parents=True)
    for path in ("", "/logs", "/logs?worker=trainer-0", "/logs/files", "/metrics", "/artifacts", "/artifacts/run.json"):
        answer = client.get(f"/v1/runs/old-1{path}")
        assert answer.status_code in (200, 404) and "secret" not in answer.text, path
    assert client.get("/runs/old-1").status_code == 200


def test_names_and_times_that_no_response_can_hold(client: TestClient, runs: Runs) -> None:
    output = put(runs)
    Path(os.fsdecode(bytes(output) + b"/x\xff")).touch()
    os.utime(output / "summary.json", (1e11, 1e14))
    assert client.get("/v1/runs/old-1/artifacts").status_code == 200


@pytest.mark.parametrize("text", ["[" * 10**5, '{"a":' * 500 + "1" + "}" * 500, '{"a": "\\ud800"}', "[1]"])
def test_hostile_summary(client: TestClient, runs: Runs, text: str) -> None:
    output = put(runs)
    for name in ("summary.json", "run.json", "steps.jsonl"):
        (output / name).write_text(text + "\n")
    assert client.get("/v1/runs/old-1").json()["summary"] is None
    assert client.get("/runs/old-1").status_code == 200


def test_long_log_lines_are_cut(client: TestClient, runs: Runs) -> None:
    output = put(runs)
    (output / "logs" / "queue.1.log").write_text("x" * 3_000_000 + "\nlast\n")
    for params in ({"worker": "queue"}, {}):
        text = client.get("/v1/runs/old-1/logs", params=params).text
        assert len(text) < 20_000 and "bytes cut)" in text and "last" in text


@cases(
    "changes",
    {"name": "n" * 300},
    {"output": "o" * 300},
    {"output": "/".join(["o"] * 2000)},
    {"seed": 10**4000},
    {"student": {"model": "/" + "m" * 300, "context_length": 8}},
    {"data": {"path": "\ud800"}},
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("dry", [False, True], ids=["start", "dry run"])
def test_hostile_values(client: TestClient, tmp_path: Path, changes: dict[str, Any], dry: bool) -> None:
    body = json.dumps(spec(tmp_path, **changes)).encode()
    answer = client.post("/v1/runs", content=body, params={"dry_run": dry}, headers=JSON)
    assert 400 <= answer.status_code < 500 and "\n" not in answer.json()["detail"]
