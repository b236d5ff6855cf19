"""The control plane: `python -m benchmarks.control list first-step readers` (all three if none is named).

They take half a minute, a minute, ten minutes; `python -m benchmarks.control_page` then writes them into the page.

`list`: `GET /v1/runs` with 10,000 stored runs. `first-step`: from `POST /v1/runs` to the first optimiser step of a
tiny run of two tokenizers. `readers`: how much 200 readers, each asking every 2 s, and 50 streams of events slow that
run's training: alternating runs without and with them, every worker of the run on one core, control plane, readers
and this process on another. Results go to `benchmarks/results/control.json`, each part replacing its last one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_name("results") / "control.json"
STORED = 10_000
ASKED = 2_000
READERS, EVERY_S, STREAMS = 200, 2.0, 50
PAIRS = 5
WARM_STEPS = 150
STEPS = 1000
PATIENCE_S = 600.0


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
            *pinned, sys.executable, "-m", "services.cli", "control", "--port", "0", "--runs-dir", str(self.runs),
            "--root", str(directory), "--on-exit", "stop",
        ]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        wait(lambda: "serving at" in self.log.read_text())
        self.url = re.findall(r"http://\S+:\d+", self.log.read_text())[0]
        self.http = httpx.Client(base_url=self.url, timeout=60)

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
    """A control plane in a temporary directory, with so many stored runs."""
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
    """Until it holds."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it never came")
        time.sleep(every_s)


def store_runs(directory: Path, count: int) -> None:
    """Runs that are over, in a control plane's database."""
    from sqlalchemy.orm import Session

    from services.control.record import RunState
    from services.control.store import RunRow, Store, now

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


def bench_list() -> dict[str, Any]:
    """Times of `GET /v1/runs` in milliseconds, one request after the other over one connection."""
    found: dict[str, Any] = {"stored_runs": STORED, "requests_of_each": ASKED}
    asked = {"first page": {}, "page in the middle": {"cursor": STORED // 2}, "failed ones": {"state": "failed"}}
    with plane(fill=STORED) as there:
        for name, params in asked.items():
            times = []
            for number in range(ASKED + 50):
                began = time.perf_counter()
                answer = there.http.get("/v1/runs", params=params)
                assert answer.status_code == 200 and len(answer.json()["runs"]) == 50
                if number >= 50:
                    times.append((time.perf_counter() - began) * 1000)
            found[name] = {"p50_ms": quantile(times, 0.5), "p99_ms": quantile(times, 0.99), "max_ms": max(times)}
        found["rss_mib"] = round(there.rss_mib, 1)
    return found


def quantile(values: list[float], share: float) -> float:
    """By rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def start_tiny(there: Plane, assets: Any, name: str, steps: int) -> tuple[str, Path, float]:
    """POST a tiny run of so many steps; returns its id, its output and when it was sent."""
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
    """The run's steps."""
    file = output / "steps.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def bench_first_step() -> dict[str, Any]:
    """Seconds from the POST until the first optimiser step is written down; models and tokenizers are there."""
    from tests.support.tiny_run import make_assets

    seconds = []
    with plane() as there:
        (there.directory / "assets").mkdir()
        assets = make_assets(there.directory / "assets")
        for number in range(3):
            run_id, output, began = start_tiny(there, assets, f"first-{number}", 10)
            wait(lambda output=output: (output / "steps.jsonl").exists() and (output / "steps.jsonl").stat().st_size)
            seconds.append(time.perf_counter() - began)
            wait(lambda run_id=run_id: there.http.get(f"/v1/runs/{run_id}").json()["state"] == "completed")
    return {"seconds": [round(value, 2) for value in seconds], "median_s": round(statistics.median(seconds), 2)}


def bench_readers() -> dict[str, Any]:
    """Seconds of training for the same steps, alternately without and with readers."""
    from tests.support.tiny_run import make_assets

    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("the readers' benchmark needs two cores")
    alone: list[float] = []
    read: list[float] = []
    loads: list[dict[str, Any]] = []
    os.sched_setaffinity(0, {cores[1]})
    with plane(core=cores[1]) as there:
        (there.directory / "assets").mkdir()
        assets = make_assets(there.directory / "assets")
        one_run(there, assets, "to-warm-up", cores, readers=False)
        for number in range(2 * PAIRS):
            readers = number % 4 in (1, 2)  # each pair the other way round: what drifts is in both
            seconds, load = one_run(there, assets, f"run-{number}", cores, readers=readers)
            (read if readers else alone).append(seconds)
            if load:
                loads.append(load)
            print(f"{'with' if readers else 'without'} readers: {seconds:.2f} s", flush=True)
        rss = there.rss_mib
    slower = statistics.median(read) / statistics.median(alone) - 1
    noise = (max(alone) - min(alone)) / statistics.median(alone)
    return {
        "readers": READERS, "every_s": EVERY_S, "streams": STREAMS, "steps": STEPS - WARM_STEPS,
        "alone_s": alone, "read_s": read, "slower": round(slower, 4), "spread_alone": round(noise, 4), "load": loads,
        "rss_mib": round(rss, 1),
    }  # fmt: skip


def one_run(
    there: Plane, assets: Any, name: str, cores: list[int], *, readers: bool
) -> tuple[float, dict[str, Any]]:  # fmt: skip
    """A run's seconds from its `WARM_STEPS`th step to its last, and what its readers saw."""
    run_id, output, _ = start_tiny(there, assets, name, STEPS)
    wait(lambda: len(lines(output)) >= 1)
    record = json.loads((output / "run.json").read_text())
    for worker in record["workers"].values():
        pin(worker["pid"], cores[0])
    load, began, taken = None, time.monotonic(), there.cpu_s
    if readers:
        command = [
            "taskset", "-c", str(cores[1]), sys.executable, "-m", "benchmarks.control", "--load", there.url, run_id,
        ]  # fmt: skip
        load = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    summary = output / "summary.json"
    wait(summary.exists, every_s=0.2)
    told = load.communicate(timeout=60)[0] if load else ""
    if load and load.returncode != 0:
        raise SystemExit("the readers have failed")
    share = (there.cpu_s - taken) / (time.monotonic() - began)
    wait(lambda: there.http.get(f"/v1/runs/{run_id}").json()["state"] == "completed")
    seconds = sum(line["seconds"] for line in lines(output)[WARM_STEPS:])
    return seconds, json.loads(told) | {"control_core_share": round(share, 4)} if told else {}


def pin(pid: int, core: int) -> None:
    """Keep a process, all its threads and its children to a core."""
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


class Load:
    """Readers and streams of one run, over plain sockets: they shall not be what is measured."""

    def __init__(self, url: str, run_id: str) -> None:
        self.host, _, port = url.removeprefix("http://").partition(":")
        self.port, self.run_id = int(port), run_id
        self.times: list[float] = []
        self.failed = self.events = 0
        self.over = asyncio.Event()

    async def run(self) -> dict[str, Any]:
        """Until the run is over."""
        readers = [self.read(number) for number in range(READERS)]
        await asyncio.gather(*readers, *(self.listen() for _ in range(STREAMS)))
        return {
            "requests": len(self.times), "failed": self.failed, "events": self.events,
            "p50_ms": quantile(self.times, 0.5) * 1000, "p99_ms": quantile(self.times, 0.99) * 1000,
        }  # fmt: skip

    async def read(self, number: int) -> None:
        """One reader: the list, the run, its curves, in turn."""
        paths = ["/v1/runs", f"/v1/runs/{self.run_id}", f"/v1/runs/{self.run_id}/metrics"]
        reader, writer = await asyncio.open_connection(self.host, self.port)
        await asyncio.sleep(EVERY_S * number / READERS)
        while not self.over.is_set():
            began = time.perf_counter()
            path = paths[number % len(paths)]
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            await reader.readexactly(int(re.search(r"content-length: (\d+)", head)[1]))  # type: ignore[index]
            self.times.append(time.perf_counter() - began)
            self.failed += " 200 " not in head.split("\r\n")[0]
            number += 1
            await asyncio.sleep(max(0.0, EVERY_S - (time.perf_counter() - began)))
        writer.close()

    async def listen(self) -> None:
        """One stream of events."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 24)
        path = f"/v1/runs/{self.run_id}/events"
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n\r\n".encode())
        async for line in reader:
            self.events += line.startswith(b"event:")
            if line.startswith(b"event: end"):
                break
        self.over.set()
        writer.close()


def main() -> None:
    """Run the parts that are named and keep their results."""
    parser = argparse.ArgumentParser()
    parts = {"list": bench_list, "first-step": bench_first_step, "readers": bench_readers}
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}")
    parser.add_argument("--load", nargs=2, metavar=("URL", "RUN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(asyncio.run(Load(*options.load).run())))
        return
    if set(options.parts) - set(parts):
        parser.error(f"the parts are {', '.join(parts)}")
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.parts or parts:
        known[name] = parts[name]() | {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "at": time.strftime("%F"),
        }
        print(json.dumps({name: known[name]}, indent=2), flush=True)
        RESULTS.write_text(json.dumps(known, indent=2) + "\n")


if __name__ == "__main__":
    main()
