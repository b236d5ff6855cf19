"""Slow-down of a run's training by readers of the control plane, by windows of one run.

Every worker of the run keeps to one core; control plane, readers and the measuring process to another.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import psutil

from benchmarks.control.plane import Readers, end, lines, plane, quantiles, start_tiny, tiny_assets, wait
from benchmarks.harness import in_process

READERS, EVERY_S = 200, 2.0
WARM_STEPS = 150
WINDOWS, WINDOW_S, WARM_UP_S = 30, 6.0, 1.0
WINDOW_STEPS = 60_000
"""More than any machine takes in the windows' time: the run is stopped when they are over."""
RESAMPLES = 2_000


def bench_windows() -> dict[str, Any]:
    """Measure seconds of a step of one long run in windows without and with readers, each beside its neighbours.

    What else the machine does changes more slowly than the windows do, so it is in both sides of every comparison.
    """
    cores = two_cores()
    with plane(core=cores[1]) as there:
        run_id, output, _ = start_tiny(there, tiny_assets(there), "windows", WINDOW_STEPS)
        wait(lambda: len(lines(output)) >= 1)
        for worker in json.loads((output / "run.json").read_text())["workers"].values():
            pin(worker["pid"], cores[0])
        wait(lambda: len(lines(output)) > WARM_STEPS, every_s=0.5)
        load = in_process(read, there.url, run_id)  # a child keeps to this process's core
        rows = lines(output)
        there.http.post(f"/v1/runs/{run_id}/stop").raise_for_status()
        wait(lambda: there.http.get(f"/v1/runs/{run_id}").json()["state"] == "stopped", every_s=0.2)
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


def two_cores() -> list[int]:
    """Restrict this process to the second core; return the run's core and that one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("the readers' benchmark needs two cores")
    os.sched_setaffinity(0, {cores[1]})
    return cores


def pin(pid: int, core: int) -> None:
    """Keep a process, all its threads and its children to a core."""
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


class Load(Readers):
    """Readers of one run, who come and go in windows."""

    def __init__(self, url: str, run_id: str) -> None:
        super().__init__(url, run_id)
        self.times: list[float] = []
        self.failed = 0

    async def run(self) -> dict[str, Any]:
        """Read in `WINDOWS` windows with all readers, as long without them before each and after the last."""
        spans = []
        for _ in range(WINDOWS):
            await asyncio.sleep(WINDOW_S)
            began = time.time()
            tasks = [asyncio.create_task(self.read(number)) for number in range(READERS)]
            await asyncio.sleep(WINDOW_S)
            await end(tasks)
            spans.append((began, time.time()))
        await asyncio.sleep(WINDOW_S)
        return {"requests": len(self.times), "failed": self.failed, **quantiles(self.times), "spans": spans}

    async def read(self, number: int) -> None:
        """Read as one reader: the list, the run, its curves, in turn."""
        paths = ["/v1/runs", f"/v1/runs/{self.run_id}", f"/v1/runs/{self.run_id}/metrics"]
        async with self.connected(EVERY_S * (number % READERS) / READERS) as connection:
            while True:
                began = time.perf_counter()
                answered, _ = await self.get(*connection, paths[number % len(paths)])
                self.times.append(time.perf_counter() - began)
                self.failed += not answered
                number += 1
                await asyncio.sleep(max(0.0, EVERY_S - (time.perf_counter() - began)))


def read(url: str, run_id: str) -> dict[str, Any]:
    """Return times of the readers' requests, and when they were there; called in a process of its own."""
    return asyncio.run(Load(url, run_id).run())
