"""A control plane for a benchmark: started, queried, given runs, ended."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.other_tree import ROOT, environment
from tests.support.control_token import bearer

PATIENCE_S = 600.0
LENGTH = re.compile(r"content-length: (\d+)")


class Plane:
    """A control plane over a directory of its own.

    Args:
        directory: Where it works.
        core: The core it keeps to; None leaves that to the system.
    """

    def __init__(self, directory: Path, core: int | None = None) -> None:
        self.directory, self.runs = directory, directory / "runs"
        self.log = directory / "control.log"
        pinned = ["taskset", "-c", str(core)] if core is not None else []
        command = [
            *pinned, sys.executable, "-m", "xtoken_services.cli", "control", "--port", "0",
            "--runs-dir", str(self.runs), "--root", str(directory), "--on-exit", "stop",
        ]  # fmt: skip
        os.environ["XDG_CONFIG_HOME"] = str(directory)  # the token is there, for processes of clients too
        env = environment(ROOT) | {"OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        wait(lambda: "serving at" in self.log.read_text())
        self.url = re.findall(r"http://\S+:\d+", self.log.read_text())[0]
        self.http = httpx.Client(base_url=self.url, timeout=60, headers=bearer())

    @property
    def rss_mib(self) -> float:
        """Memory of its process."""
        return psutil.Process(self.process.pid).memory_info().rss / 2**20

    @property
    def cpu_s(self) -> float:
        """Seconds of a core that its process has taken."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        """End it and its runs."""
        self.http.close()
        self.process.terminate()
        self.process.wait(120)


@contextmanager
def plane(core: int | None = None, fill: int = 0) -> Iterator[Plane]:
    """Start a control plane in a temporary directory, with so many stored runs."""
    with tempfile.TemporaryDirectory(prefix="xtoken-bench-") as place:
        directory = Path(place)
        if fill:
            store_runs(directory / "runs", fill)
        found = Plane(directory, core)
        try:
            yield found
        finally:
            found.close()


def wait(condition: Any, within_s: float = PATIENCE_S, every_s: float = 0.01) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it never came")
        time.sleep(every_s)


def store_runs(directory: Path, count: int) -> None:
    """Store runs that are over in a control plane's database."""
    from sqlalchemy.orm import Session

    from xtoken_services.common.run.status import RunState
    from xtoken_services.control.store import RunRow, Store, now

    directory.mkdir(parents=True)
    store = Store(directory)
    states = [RunState.COMPLETED, RunState.FAILED, RunState.STOPPED]
    spec = {"name": "run", "student": {"model": "/data/model"}, "note": "x" * 2000}
    with Session(store._engine) as session, session.begin():
        session.add_all(
            RunRow(
                id=f"run-{n:05d}", name="run", output=f"/runs/{n}", created=now(), began=now(), ended=now(), spec=spec,
                state=states[n % 3], step=n, steps=n,
            )
            for n in range(count)
        )  # fmt: skip
    store.close()


class Readers:
    """Readers of one run over plain sockets, so that their own cost stays small.

    Args:
        url: URL of the control plane.
        run_id: The run.
    """

    def __init__(self, url: str, run_id: str) -> None:
        self.host, _, port = url.removeprefix("http://").partition(":")
        self.port, self.run_id = int(port), run_id
        headers = {"Host": f"{self.host}:{port}"} | bearer()
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())

    @asynccontextmanager
    async def connected(self, waits_s: float) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Yield a connection after a wait."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            await asyncio.sleep(waits_s)
            yield reader, writer
        finally:
            writer.close()

    def send(self, writer: asyncio.StreamWriter, path: str) -> None:
        """Send a GET."""
        writer.write(f"GET {path} HTTP/1.1\r\n{self._headers}\r\n".encode())

    async def get(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> tuple[bool, bytes]:
        """Return whether a GET is answered by 200, and the answer's body."""
        self.send(writer, path)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = LENGTH.search(head)
        assert length is not None, head
        return " 200 " in head.split("\r\n")[0], await reader.readexactly(int(length[1]))


async def end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks.

    Raises:
        SystemExit: One has ended before.
    """
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    if wrong := [error for error in ended if not isinstance(error, asyncio.CancelledError)]:
        raise SystemExit(f"a reader has ended early: {wrong[0]!r}")


def tiny_assets(there: Plane) -> Any:
    """Write the models and text of tiny runs below the control plane's directory."""
    from tests.support.tiny_run import make_assets

    (there.directory / "assets").mkdir()
    return make_assets(there.directory / "assets")


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile by rank and the longest of some times, in milliseconds."""
    ranked = sorted(seconds)
    ranks = {"p50_ms": len(ranked) // 2, "p99_ms": int(0.99 * len(ranked)), "max_ms": len(ranked) - 1}
    return {name: 1e3 * ranked[rank] for name, rank in ranks.items()}


def start_tiny(there: Plane, assets: Any, name: str, steps: int) -> tuple[str, Path, float]:
    """Send a POST for a tiny run of so many steps; return its id, its output and when it was sent."""
    from tests.support.tiny_run import tiny_spec

    spec = tiny_spec(
        assets, there.directory / name, records=8 * steps, output=there.runs / name,
        workers={"collators": 1, "device": "cpu"}, train={"checkpoint_every": 10_000},
    )  # fmt: skip
    began = time.perf_counter()
    answer = there.http.post("/v1/runs", json=spec.model_dump(mode="json"))
    assert answer.status_code == 201, answer.text
    return answer.json()["id"], spec.output, began


def lines(output: Path) -> list[dict[str, Any]]:
    """Return the run's steps."""
    file = output / "steps.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
