"""A control plane with a real run and one that is over, started as a user starts them."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from tests.attack.free_time import FreeTime
from tests.attack.target import Target
from tests.contract.processes import free_port, start_queue
from tests.support.tiny_run import TinyAssets, documents, make_assets, tiny_spec, write_jsonl
from xtoken_core.data_plane.address import Address

PATIENCE_S = 240.0
QUEUE_MEMORY = 64 << 20
SAMPLES_PER_STEP = 8
KEPT_LINES = 8


class Stage:
    """Everything that is attacked.

    Args:
        directory: Private directory for it.
        assets: Tiny models; made if None.

    Attributes:
        target: What attacks are given.
        run_id: Id of the run that trains.
        pids: Process ids of the control plane and of the run's workers when they had started, by name.
    """

    def __init__(self, directory: Path, assets: TinyAssets | None = None) -> None:
        self.directory = directory
        self.assets = assets or self._make_assets(directory / "readable")
        self.log = directory / "control.log"
        self.queue: subprocess.Popen[bytes] | None = None
        temporary = Path(tempfile.mkdtemp(prefix="xa-", dir=directory))
        token = directory / "token"
        working = directory / "working"
        working.mkdir()
        command = [
            sys.executable, "-P", "-m", "xtoken_services.cli", "control", "--port", "0",
            "--runs-dir", str(directory / "runs"),
            "--root", str(directory / "readable"), "--token-file", str(token), "--on-exit", "stop",
        ]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=working, stdout=log, stderr=log, env=env)
        try:
            self._prepare(token, temporary)
        except BaseException:
            self.close()
            raise

    def _prepare(self, token: Path, temporary: Path) -> None:
        """Start both runs, and wait until one is over and the other one trains."""
        directory = self.directory
        self.wait_for(lambda: "serving at" in self.log.read_text())
        url = re.findall(r"http://\S+:\d+", self.log.read_text())[0]
        spec = self._spec(
            "main", records=2000, data={"epochs": 100_000}, queue={"block_size": 4, "memory_limit": QUEUE_MEMORY},
            train={"checkpoint_every": 50},
        )  # fmt: skip
        other = Address.parse(f"tcp://127.0.0.1:{free_port()}", directory / "queue-token")
        with (directory / "queue.log").open("wb") as log:
            self.queue = start_queue(other, "--memory-limit", str(QUEUE_MEMORY), stderr=log)
        plain = Target(
            url, token.read_text().strip(), other, (other, other),
            directory / "readable", directory / "runs", self._spec("plain", records=64), FreeTime(), "",
            directory / "runs" / "victim", directory / "working",
        )  # fmt: skip
        victim = self._start(plain, self._spec("victim", records=64))
        self.wait_for(lambda: self._state(plain, victim) == "completed")
        self.run_id = self._start(plain, spec)
        self.wait_for(lambda: self._steps(plain) >= 3)
        (socket,) = temporary.glob("xtoken-*/queue")
        own = Address.parse(f"ipc://{socket}")
        self.target = replace(plain, queue=own, queues=(own, other), victim=victim)
        self.output = directory / "runs" / "main"
        with self.target.http() as http:
            workers = http.get(f"/v1/runs/{self.run_id}").json()["workers"]
        self.pids = {
            "control": self.process.pid,
            "tcp queue": self.queue.pid,
            **{worker["name"]: worker["pid"] for worker in workers},
        }

    def wait_for(self, condition: Callable[[], Any], seconds: float = PATIENCE_S) -> None:
        """Wait for a condition while the control plane lives."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the stage is not ready: {self.log.read_text()[-2000:]}")
            time.sleep(0.1)

    def close(self) -> str:
        """Stop the run and the control plane; returns an empty text, or how that failed."""
        if self.queue is not None:
            self.queue.terminate()
            self.queue.wait(60)
        self.process.terminate()
        try:
            status = self.process.wait(120)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
            self.process.wait()
            return "the control plane did not end within 120 s of SIGTERM"
        return "" if status == 0 else f"the control plane exited with status {status}"

    def missing_ids(self) -> str:
        """Check that every step so far holds exactly its positions; returns an empty text, or the first fault."""
        lines = (self.output / "steps.jsonl").read_text().split("\n")[:-1]  # a line that is being written has no end
        for number, line in enumerate(lines):
            row = json.loads(line)
            ids = sorted([*row["ids"], *row["skipped"], *row["dead"]])
            first = number * SAMPLES_PER_STEP
            if row["step"] != number or ids != list(range(first, first + SAMPLES_PER_STEP)):
                return f"line {number} of steps.jsonl is step {row['step']} with ids {ids}"
        return "" if lines else "no step was trained"

    def end_of_log(self, worker: str) -> str:
        """Return the last lines of a worker's log in one line; an empty text without one."""
        lines = [line for log in sorted((self.output / "logs").glob(f"{worker}.*.log"))
                 for line in log.read_text(errors="replace").splitlines()[-KEPT_LINES:]]  # fmt: skip
        return ": " + " | ".join(lines) if lines else ""

    def steps(self) -> int:
        """Return the number of steps that the run has trained."""
        return len((self.output / "steps.jsonl").read_text().splitlines())

    def _make_assets(self, directory: Path) -> TinyAssets:
        directory.mkdir()
        return make_assets(directory)

    def _spec(self, name: str, records: int, **changes: Any) -> dict[str, Any]:
        texts = self.directory / "readable" / f"{name}.jsonl"
        if not texts.exists():
            write_jsonl(texts, documents(records, seed=2))
        spec = tiny_spec(
            self.assets, self.directory / "readable", records=1, name=name, output=self.directory / "runs" / name,
            workers={"collators": 1, "device": "cpu"}, **{"data": {}, **changes},
        )  # fmt: skip
        document: dict[str, Any] = spec.model_dump(mode="json", exclude_defaults=True)
        document["data"]["path"] = str(texts)
        return document

    def _start(self, target: Target, spec: dict[str, Any]) -> str:
        with target.http(timeout=120) as http:
            response = http.post("/v1/runs", json=spec)
            assert response.status_code == 201, response.text
            return str(response.json()["id"])

    def _state(self, target: Target, run_id: str) -> str:
        with target.http() as http:
            row = http.get(f"/v1/runs/{run_id}").json()
        if row["state"] == "failed":
            raise RuntimeError(f"the run failed: {row}")
        return str(row["state"])

    def _steps(self, target: Target) -> int:
        if self._state(target, self.run_id) == "completed":
            raise RuntimeError("the run ended too early")
        file = self.directory / "runs" / "main" / "steps.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0
