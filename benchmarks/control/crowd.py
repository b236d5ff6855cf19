"""A crowd of readers of a control plane with many stored runs: pages, statuses, curves, and followed logs of one run.

The followed run trains at the lowest priority. A log of its own gets a line every second, and each stream records when
it arrives.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import time
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import psutil

from benchmarks.control.plane import Readers, end, lines, plane, quantiles, start_tiny, tiny_assets, wait
from benchmarks.harness import in_process

STORED = 10_000
ASKING, STREAMS = 300, 200
EVERY_S = 2.0
SECONDS, SETTLE_S = 60.0, 5.0
RUN_STEPS = 100_000
"""More than any machine takes meanwhile: the run is stopped at the end."""
LOG = "logs/crowd-0.1.log"
LINE = re.compile(rb"sent (\d+\.\d+)")


def bench_crowd() -> dict[str, Any]:
    """Return waiting times by kind of request, and delays of followed lines."""
    with plane(fill=STORED) as control:
        run_id, output, _ = start_tiny(control, tiny_assets(control), "followed", RUN_STEPS)
        wait(lambda: len(lines(output)) >= 3, every_s=0.2)
        for worker in json.loads((output / "run.json").read_text())["workers"].values():
            psutil.Process(worker["pid"]).nice(19)
        used, began = control.cpu_s, time.monotonic()
        seen = in_process(read, control.url, run_id, output / LOG)
        core_fraction = (control.cpu_s - used) / (time.monotonic() - began)
        rss = control.rss_mib
        control.http.post(f"/v1/runs/{run_id}/stop", params={"now": True}).raise_for_status()
    return {
        "stored_runs": STORED, "asking": ASKING, "every_s": EVERY_S, "streams": STREAMS, "seconds": SECONDS,
        **seen, "control_core_fraction": round(core_fraction, 3), "rss_mib": round(rss, 1),
        "load": os.getloadavg()[0],
    }  # fmt: skip


class Crowd(Readers):
    """Readers of many pages, and of one run's logs.

    Args:
        url: URL of the control plane.
        run_id: Run whose status, curves and logs are read.
        log: Log file of that run, to which this process writes.
    """

    def __init__(self, url: str, run_id: str, log: Path) -> None:
        super().__init__(url, run_id)
        self.log = log
        self.times: dict[str, list[float]] = defaultdict(list)
        self.delays: dict[int, list[float]] = defaultdict(list)
        self.failed = 0
        self.recording = False

    async def run(self) -> dict[str, Any]:
        """Read for some time and return what was seen."""
        self.log.touch()
        tasks = [asyncio.create_task(one) for one in self._everybody()]
        await asyncio.sleep(SETTLE_S)
        self.recording = True
        with self.log.open("a") as file:
            for _ in range(int(SECONDS)):
                file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} INFO sent {time.time():.4f}\n")
                file.flush()
                await asyncio.sleep(1.0)
        await asyncio.sleep(SETTLE_S)
        self.recording = False
        await end(tasks)
        return {"requests": self._requests(), "failed": self.failed, "followed": self._followed()}

    def _everybody(self) -> list[Any]:
        return [*(self.ask(number) for number in range(ASKING)), *(self.follow(number) for number in range(STREAMS))]

    def _requests(self) -> dict[str, Any]:
        return {name: {"count": len(times), **quantiles(times)} for name, times in sorted(self.times.items())}

    def _followed(self) -> dict[str, Any]:
        every = [delay for delays in self.delays.values() for delay in delays]
        means = sorted(statistics.fmean(delays) for delays in self.delays.values())
        return {
            "lines_each": [min(map(len, self.delays.values())), max(map(len, self.delays.values()))],
            "streams": len(self.delays),
            "slowest_to_median": means[-1] / statistics.median(means),
            **quantiles(every),
        }

    async def ask(self, number: int) -> None:
        """Send requests of all kinds in turn, one every `EVERY_S`."""
        draw = Random(number)
        run = f"/v1/runs/{self.run_id}"
        async with self.connected(draw.uniform(0, EVERY_S)) as connection:
            while True:
                paths = {
                    "first page": "/v1/runs", "page in the middle": f"/v1/runs?cursor={draw.randrange(STORED)}",
                    "status": run, "curves": f"{run}/metrics", "page of runs": "/",
                    "page of the run": f"/runs/{self.run_id}/live",
                }  # fmt: skip
                name = list(paths)[number % len(paths)]
                number += 1
                began = time.perf_counter()
                answered, _ = await self.get(*connection, paths[name])
                if self.recording:
                    self.times[name].append(time.perf_counter() - began)
                    self.failed += not answered
                await asyncio.sleep(max(0.0, EVERY_S - (time.perf_counter() - began)))

    async def follow(self, number: int) -> None:
        """Follow the run's logs."""
        async with self.connected(EVERY_S * number / STREAMS) as (reader, writer):
            self.send(writer, f"/v1/runs/{self.run_id}/logs?follow=true&tail=1")
            while line := await reader.readline():
                sent = LINE.search(line)
                if sent is not None and self.recording:
                    self.delays[number].append(time.time() - float(sent[1]))
            raise ConnectionError("the stream has ended")


def read(url: str, run_id: str, log: Path) -> dict[str, Any]:
    """Return a crowd's answers and failures; called in a process of its own."""
    return asyncio.run(Crowd(url, run_id, log).run())
