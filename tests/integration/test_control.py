"""The control plane with real runs: over HTTP, as the client of one, and in place; and what a signal leaves behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from tests.integration.conftest import Tiny
from tests.support.control_token import bearer
from tests.support.tiny_run import RUN_NAME, TinyAssets, steps_of, tiny_spec, write_run
from tests.support.waiting import until
from xtoken_core.config.spec import RunSpec
from xtoken_services.common.files.allowed_paths import Roots
from xtoken_services.common.run.inspection import inspect_run
from xtoken_services.common.run.resolve import resolve_run
from xtoken_services.supervisor.run_record import is_finished
from xtoken_services.trainer.checkpoint import Checkpoints, Cursor

DEADLINE_S = 180.0
WHOLE_RUN_S = 600.0
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from xtoken_services.cli import main; main()"


class Command:
    """A running `xtoken` command; its temporary files go to a directory of their own."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        program: tuple[str, ...] = ("-m", "xtoken_services.cli"),
        cwd: Path | None = None,
    ) -> None:
        self.temporary = directory / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self.output = directory / f"{arguments[0]}.output"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", *program, *arguments],
                stdout=output,
                stderr=output,
                env=env,
                cwd=cwd,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.output.read_text()

    def until(self, condition: Callable[[], bool], within_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert self.process.poll() is None, f"it ended early: {self.said()}"
            assert time.monotonic() < deadline, f"it never came: {self.said()}"
            time.sleep(0.05)

    def ended(self) -> int:
        return self.process.wait(DEADLINE_S)


def run_file(spec: RunSpec, directory: Path) -> Path:
    """The specification as TOML: every value of JSON is one of TOML, but for null and for objects in lists.

    Without an evaluation none is added: all of the text is trained.
    """

    return write_run(directory, {"eval": "none"} | spec.model_dump(mode="json", exclude_defaults=True))


def serve(directory: Path, assets: TinyAssets, **command: Any) -> tuple[Command, str]:
    """A control plane whose runs may read the tiny assets and the directory; and its URL."""
    roots = ("--root", str(assets.student.parent), "--root", str(directory))
    control = Command(directory, "control", "--port", "0", "--runs-dir", str(directory / "runs"), *roots, **command)
    control.until(lambda: "serving at" in control.said())
    return control, re.findall(r"http://\S+:\d+", control.said())[-1]


def workers_of(output: Path) -> list[int]:
    """The pids of a run's living processes, by its own record."""
    record = json.loads((output / "run.json").read_text()) if (output / "run.json").exists() else {"workers": {}}
    return [worker["pid"] for worker in record["workers"].values() if worker["pid"]]


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory() -> Iterator[None]:
    before = set(Path("/dev/shm").glob("xtoken*"))
    yield
    until(lambda: set(Path("/dev/shm").glob("xtoken*")) <= before)


@pytest.mark.slow
def test_runs_over_http_by_a_process_without_torch(tmp_path: Path, assets: TinyAssets, planted: Path) -> None:
    runs = tmp_path / "runs"
    control, url = serve(tmp_path, assets, program=("-c", WITHOUT_TORCH), cwd=planted)
    try:
        with httpx.Client(base_url=url, timeout=60, headers=bearer()) as http:
            _stop(control, http, tiny_spec(assets, tmp_path / "long", records=4000, output=runs / "long"))
            short = tiny_spec(
                assets, tmp_path / "short", records=240, output=runs / "short", workers={"collators": 1}
            )  # fmt: skip
            _complete(tmp_path, http, url, short)
            assert [run["state"] for run in http.get("/v1/runs").json()["runs"]] == ["completed", "stopped"]
        control.process.terminate()
        assert control.ended() == 0, control.said()
        assert list(control.temporary.iterdir()) == []
    finally:
        control.process.kill()


def _stop(control: Command, http: httpx.Client, spec: RunSpec) -> None:
    body = spec.model_dump(mode="json")
    answer = http.post("/v1/runs", json=body)
    assert answer.status_code == 201, answer.text
    path = answer.headers["location"]
    control.until(lambda: all(w["pid"] for w in http.get(path).json()["workers"]))
    refused = http.post("/v1/runs", json=body)
    assert refused.status_code == 409
    assert refused.json()["detail"].startswith(f"output: {spec.output} belongs to the run {path.split('/')[-1]}")
    pids = [w["pid"] for w in http.get(path).json()["workers"]]
    assert http.post(f"{path}/stop", params={"now": True}).status_code == 202
    control.until(lambda: http.get(path).json()["state"] == "stopped")
    assert gone(pids)


def _complete(tmp_path: Path, http: httpx.Client, url: str, spec: RunSpec) -> None:
    client = Command(tmp_path, "run", str(run_file(spec, tmp_path)), "--control", url)
    client.until(lambda: len(steps_of(spec.output)) >= 3)
    path = f"/v1/runs/{http.get('/v1/runs').json()['runs'][0]['id']}"
    client.until(lambda: http.get(path).json()["last"] is not None)
    shown = http.get(path).json()
    assert (shown["state"], shown["steps"]) == ("running", 30)
    assert {w["name"] for w in shown["workers"]} == {"queue", "collator-0", "teacher-0-0", "trainer-0"}
    assert all(w["heartbeat_age_s"] < 15 for w in shown["workers"] if w["kind"] != "queue" and w["phase"])
    assert "loss" in shown["last"] and "ids" not in shown["last"]
    client.until(lambda: len(http.get(f"{path}/metrics", params={"after": 0}).json()["steps"]) >= 2)
    metrics = http.get(f"{path}/metrics", params={"after": 0}).json()
    assert [line["step"] for line in metrics["steps"]][:2] == [1, 2]
    assert client.ended() == 0, client.said()
    assert f"{RUN_NAME}: completed after step 30 of 30: 240 trained" in client.said()
    assert sorted(i for line in steps_of(spec.output) for i in line["ids"]) == list(range(240))
    assert http.get(path).json()["summary"]["trained"] == 240


@pytest.mark.slow
def test_interrupting_a_run_in_place_stops_it_in_order(tmp_path: Path, assets: TinyAssets) -> None:
    spec = tiny_spec(assets, tmp_path, records=4000, workers={"collators": 1}, train={"checkpoint_every": 1000})
    command = Command(tmp_path, "run", str(run_file(spec, tmp_path)))
    command.until(lambda: len(steps_of(spec.output)) >= 2)
    pids = workers_of(spec.output)
    assert len(pids) == 4
    command.process.send_signal(signal.SIGINT)
    assert command.ended() == 130, command.said()
    assert gone(pids) and list(command.temporary.iterdir()) == []
    assert "Shutting down gracefully" in command.said() and "Traceback" not in command.said()
    assert json.loads((spec.output / "run.json").read_text())["state"] == "stopped"
    assert len(list((spec.output / "checkpoints").iterdir())) == 1, "the trainer has saved where it was"


@pytest.mark.slow
def test_the_inspection_of_a_run_without_its_cache_makes_it_again(tmp_path: Path, assets: TinyAssets) -> None:
    spec = tiny_spec(assets, tmp_path, records=240, eval={})
    environment = Roots.of([tmp_path, assets.student.parent], [tmp_path]).environment
    first, _ = inspect_run(spec, lambda _activity, _done: None, environment)
    shutil.rmtree(spec.output / "cache")
    again, _ = inspect_run(spec, lambda _activity, _done: None, environment)
    assert again == first and 0 < first.records < 240
    spec.data.paths[0].write_text(spec.data.paths[0].read_text() + '{"text": "one more"}\n')
    other, _ = inspect_run(spec, lambda _activity, _done: None, environment)
    assert other.data_fingerprint != first.data_fingerprint


@pytest.mark.slow
def test_a_backup_without_the_cache_resumes_on_a_control_plane(tmp_path: Path, assets: TinyAssets) -> None:
    runs = tmp_path / "runs"
    spec = tiny_spec(assets, tmp_path, records=400, output=runs / "run", workers={"collators": 1})
    control, url = serve(tmp_path, assets)
    try:
        with httpx.Client(base_url=url, timeout=60, headers=bearer()) as http:
            document = spec.model_dump(mode="json", exclude_defaults=True)
            del document["teacher"][0]["context_length"]  # what is left out is completed, and some text held back
            answer = http.post("/v1/runs", json=document)
            assert answer.status_code == 201, answer.text
            path = answer.headers["location"]
            taken = answer.json()["spec"]
            assert taken["data"]["path"] == str(spec.data.path) and taken["eval"]["path"] == []
            control.until(lambda: len(steps_of(spec.output)) >= 3)
            http.post(f"{path}/stop")
            control.until(lambda: http.get(path).json()["state"] == "stopped")
            backup = tmp_path / "backup"
            spec.output.rename(backup)
            shutil.copytree(backup, spec.output, ignore=shutil.ignore_patterns("cache"))
            assert http.post(f"{path}/resume").status_code == 202
            control.until(lambda: http.get(path).json()["state"] == "completed", WHOLE_RUN_S)
            trained = http.get(path).json()["summary"]["trained"]
            assert 0 < trained < 400
            assert sorted(i for line in steps_of(spec.output) for i in line["ids"]) == list(range(trained))
    finally:
        control.process.kill()


def finished_output(spec: RunSpec) -> None:
    """What a run leaves that has come to its end: a checkpoint behind its last step, its model, its summary."""
    run = resolve_run(spec)
    checkpoints = Checkpoints(spec.output / "checkpoints", run)
    checkpoints.save(Cursor(step=run.steps, trained=run.positions), {"w": torch.ones(1)})
    checkpoints.wait()
    (spec.output / "model").mkdir()
    (spec.output / "summary.json").write_text(json.dumps({"trained": run.positions, "positions": run.positions}))
    (spec.output / "spec.json").write_text(spec.model_dump_json())


def test_a_run_that_is_finished_says_so_and_starts_nothing(tmp_path: Path, assets: TinyAssets) -> None:
    spec = tiny_spec(assets, tmp_path, records=16)
    finished_output(spec)
    command = Command(tmp_path, "run", str(run_file(spec, tmp_path)))
    assert command.ended() == 0, command.said()
    assert "nothing is left to do" in command.said()
    assert f"{RUN_NAME}: completed after step 2 of 2: 16 trained of 16 samples" in command.said()
    assert not (spec.output / "logs").exists()
    assert json.loads((spec.output / "run.json").read_text())["state"] == "completed"


@pytest.mark.parametrize("what", ["model", "spec.json"])
def test_only_the_very_same_run_is_finished(tmp_path: Path, assets: TinyAssets, what: str) -> None:
    spec = tiny_spec(assets, tmp_path, records=16)
    finished_output(spec)
    assert is_finished(spec)
    (spec.output / what).rename(spec.output / "elsewhere")
    assert not is_finished(spec)
    (spec.output / "elsewhere").rename(spec.output / what)
    other = spec.train.model_copy(update={"learning_rate": 2 * spec.train.learning_rate})
    assert not is_finished(spec.model_copy(update={"train": other}))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [pytest.param(1, id="training"), pytest.param(0, id="starting")])
def test_killing_a_run_in_place_takes_everything_with_it(tmp_path: Path, assets: TinyAssets, steps: int) -> None:
    spec = tiny_spec(assets, tmp_path, records=4000, workers={"collators": 1})
    command = Command(tmp_path, "run", str(run_file(spec, tmp_path)))
    command.until(lambda: len(steps_of(spec.output)) >= steps and len(workers_of(spec.output)) == 4)
    pids = workers_of(spec.output)
    command.process.kill()
    command.ended()
    until(lambda: gone(pids) and not list(command.temporary.iterdir()))


@pytest.mark.timeout(3 * WHOLE_RUN_S)
@pytest.mark.parametrize(
    "killed",
    [
        pytest.param(("collator-0", "teacher-0-0", "trainer-0"), marks=pytest.mark.slow, id="workers"),
        pytest.param(("queue",), marks=pytest.mark.slow, id="queue"),
    ],
)
def test_a_killed_control_plane_is_replaced_while_training_goes_on(tiny: Tiny, killed: tuple[str, ...]) -> None:
    runs = tiny.path / "runs"
    spec = tiny.spec("run", records=2400, output=runs / "run", workers={"collators": 1})
    first, url = serve(tiny.path, tiny.assets)
    try:
        answer = httpx.post(f"{url}/v1/runs", json=spec.model_dump(mode="json"), timeout=60, headers=bearer())
        path = answer.headers["location"]
        first.until(lambda: len(steps_of(spec.output)) >= 3)
        pids = {w["name"]: w["pid"] for w in httpx.get(url + path, headers=bearer()).json()["workers"]}
    finally:
        first.process.kill()
        first.ended()
    assert not any(gone([pid]) for pid in pids.values())
    second, url = serve(tiny.path, tiny.assets)
    try:
        shown = httpx.get(url + path, timeout=60, headers=bearer()).json()
        assert (shown["state"], {w["name"]: w["pid"] for w in shown["workers"]}) == ("running", pids)
        at = len(steps_of(spec.output))
        second.until(lambda: len(steps_of(spec.output)) > at)
        for name in killed:
            psutil.Process(pids[name]).kill()
        second.until(
            lambda: httpx.get(url + path, timeout=60, headers=bearer()).json()["state"] == "completed", WHOLE_RUN_S
        )
        assert sorted(i for line in steps_of(spec.output) for i in line["ids"]) == list(range(2400))
        shown = httpx.get(url + path, timeout=60, headers=bearer()).json()
        assert all(w["restarts"] >= 1 for w in shown["workers"] if w["name"] in killed)
        notes = [note["message"] for note in httpx.get(f"{url}{path}/notes", timeout=60, headers=bearer()).json()]
        assert any(note.startswith("recovered: queue, collator-0, teacher-0-0, trainer-0") for note in notes)
        second.process.terminate()
        assert second.ended() == 0
        assert gone(workers_of(spec.output)) and list(second.temporary.iterdir()) == []
    finally:
        second.process.kill()
