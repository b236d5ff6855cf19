"""Slow-down of a run's training by readers of the control plane: by alternating runs, and by windows of one run.

Every worker of the run keeps to one core; control plane, readers and the measuring process to another.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import psutil

from benchmarks.control.plane import ROOT, Plane, Readers, end, lines, plane, quantile, start_tiny, tiny_assets, wait

READERS, EVERY_S = 200, 2.0
OVER = re.compile(rb'"state":"(completed|failed|stopped|interrupted)"')
PAIRS = 5
WARM_STEPS = 150
STEPS = 1000
WINDOWS, WINDOW_S, WARM_UP_S = 30, 6.0, 1.0
WINDOW_STEPS = 60_000
"""More than any machine takes in the windows' time: the run is stopped when they are over."""
RESAMPLES = 2_000


def bench_readers() -> dict[str, Any]:
    """Measure seconds of training for the same steps, alternately without and with readers."""
    alone: list[float] = []
    read: list[float] = []
    loads: list[dict[str, Any]] = []
    cores = two_cores()
    with plane(core=cores[1]) as there:
        assets = tiny_assets(there)
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
        "readers": READERS, "every_s": EVERY_S, "steps": STEPS - WARM_STEPS,
        "alone_s": alone, "read_s": read, "slower": round(slower, 4), "spread_alone": round(noise, 4), "load": loads,
        "rss_mib": round(rss, 1),
    }  # fmt: skip


def bench_windows() -> dict[str, Any]:
    """Measure seconds of a step of one long run in windows without and with readers, each beside its neighbours.

    What else the machine does changes more slowly than the windows do, so it is in both sides of every comparison.
    """
    cores = two_cores()
    with plane(core=cores[1]) as there:
        run_id, output = _pinned(there, tiny_assets(there), "windows", cores, WINDOW_STEPS)
        wait(lambda: len(lines(output)) > WARM_STEPS, every_s=0.5)
        printed = subprocess.run(
            [*_load_command(there, run_id, cores), "--windows", str(WINDOWS)],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
        ).stdout  # fmt: skip
        rows = lines(output)
        there.http.post(f"/v1/runs/{run_id}/stop").raise_for_status()
        wait(lambda: there.http.get(f"/v1/runs/{run_id}").json()["state"] == "stopped", every_s=0.2)
    load = json.loads(printed)
    found = windows(rows, [tuple(span) for span in load.pop("spans")])
    return {"readers": READERS, "every_s": EVERY_S, "window_s": WINDOW_S, **found, "load": load}


def windows(rows: Sequence[dict[str, Any]], spans: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Compare every window with readers with the mean of its two neighbours without.

    Args:
        rows: The run's steps: `time` when one ended, `seconds` that it took.
        spans: When readers were there, in the clock of `time`; before each, between two and after the last as long
            without them.

    Returns:
        `slower`, the median over windows of how much longer a step took; `interval`, its 95% interval by resampling
        windows; and each window's mean seconds of a step.
    """
    edges = [spans[0][0] - WINDOW_S, *(edge for span in spans for edge in span), spans[-1][1] + WINDOW_S]
    means = [_mean_step(rows, began + WARM_UP_S, ended) for began, ended in pairwise(edges)]
    alone, read = means[0::2], means[1::2]
    shares = [
        mine / statistics.fmean(around) - 1 for mine, around in zip(read, pairwise(alone), strict=True)
    ]  # fmt: skip
    draw = Random(0)
    medians = sorted(statistics.median(draw.choices(shares, k=len(shares))) for _ in range(RESAMPLES))
    return {
        "slower": round(statistics.median(shares), 4),
        "interval": [round(medians[int(RESAMPLES * share)], 4) for share in (0.025, 0.975)],
        "alone_s": [round(value, 6) for value in alone],
        "read_s": [round(value, 6) for value in read],
    }


def _mean_step(rows: Sequence[dict[str, Any]], began: float, ended: float) -> float:
    inside = [row["seconds"] for row in rows if began <= row["time"] - row["seconds"] and row["time"] <= ended]
    return statistics.fmean(inside)


def one_run(
    there: Plane, assets: Any, name: str, cores: list[int], *, readers: bool
) -> tuple[float, dict[str, Any]]:  # fmt: skip
    """Measure a run's seconds from its `WARM_STEPS`th step to its last; return them and what its readers saw."""
    run_id, output = _pinned(there, assets, name, cores, STEPS)
    load, began, taken = None, time.monotonic(), there.cpu_s
    if readers:
        load = subprocess.Popen(_load_command(there, run_id, cores), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait((output / "summary.json").exists, every_s=0.2)
    printed = load.communicate(timeout=60)[0] if load else ""
    if load and load.returncode != 0:
        raise SystemExit("the readers have failed")
    share = (there.cpu_s - taken) / (time.monotonic() - began)
    wait(lambda: there.http.get(f"/v1/runs/{run_id}").json()["state"] == "completed")
    seconds = sum(line["seconds"] for line in lines(output)[WARM_STEPS:])
    return seconds, json.loads(printed) | {"control_core_share": round(share, 4)} if printed else {}


def two_cores() -> list[int]:
    """Restrict this process to the second core; return the run's core and that one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("the readers' benchmark needs two cores")
    os.sched_setaffinity(0, {cores[1]})
    return cores


def _pinned(there: Plane, assets: Any, name: str, cores: list[int], steps: int) -> tuple[str, Path]:
    """Start a tiny run whose workers all keep to the first core; return its id and its output."""
    run_id, output, _ = start_tiny(there, assets, name, steps)
    wait(lambda: len(lines(output)) >= 1)
    record = json.loads((output / "run.json").read_text())
    for worker in record["workers"].values():
        pin(worker["pid"], cores[0])
    return run_id, output


def _load_command(there: Plane, run_id: str, cores: list[int]) -> list[str]:
    python = [sys.executable, "-m", "benchmarks.control.readers"]
    return ["taskset", "-c", str(cores[1]), *python, there.url, run_id]


def pin(pid: int, core: int) -> None:
    """Keep a process, all its threads and its children to a core."""
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


class Load(Readers):
    """Readers of one run, who read until it is over or in windows."""

    def __init__(self, url: str, run_id: str) -> None:
        super().__init__(url, run_id)
        self.times: list[float] = []
        self.failed = 0
        self.over = asyncio.Event()

    async def run(self) -> dict[str, Any]:
        """Read until the run is over."""
        await asyncio.gather(*self._everybody())
        return self.seen()

    async def run_windows(self, count: int) -> dict[str, Any]:
        """Read in so many windows with all readers, as long without them before each and after the last."""
        spans = []
        for _ in range(count):
            await asyncio.sleep(WINDOW_S)
            began = time.time()
            tasks = [asyncio.create_task(one) for one in self._everybody()]
            await asyncio.sleep(WINDOW_S)
            await end(tasks)
            spans.append((began, time.time()))
        await asyncio.sleep(WINDOW_S)
        return {**self.seen(), "spans": spans}

    def seen(self) -> dict[str, Any]:
        """Return number, failures and times of the requests so far."""
        return {
            "requests": len(self.times), "failed": self.failed,
            "p50_ms": quantile(self.times, 0.5) * 1000, "p99_ms": quantile(self.times, 0.99) * 1000,
        }  # fmt: skip

    def _everybody(self) -> list[Any]:
        return [self.read(number) for number in range(READERS)]

    async def read(self, number: int) -> None:
        """Read as one reader: the list, the run, its curves, in turn."""
        paths = ["/v1/runs", f"/v1/runs/{self.run_id}", f"/v1/runs/{self.run_id}/metrics"]
        async with self.connected(EVERY_S * (number % READERS) / READERS) as connection:
            while not self.over.is_set():
                began = time.perf_counter()
                path = paths[number % len(paths)]
                answered, body = await self.get(*connection, path)
                if path == paths[1] and OVER.search(body):
                    self.over.set()
                self.times.append(time.perf_counter() - began)
                self.failed += not answered
                number += 1
                await asyncio.sleep(max(0.0, EVERY_S - (time.perf_counter() - began)))


def main() -> None:
    """Run the load itself, in a process of its own: `URL RUN [--windows COUNT]`."""
    url, run_id, *rest = sys.argv[1:]
    load = Load(url, run_id)
    print(json.dumps(asyncio.run(load.run_windows(int(rest[1])) if rest else load.run())))


if __name__ == "__main__":
    main()
