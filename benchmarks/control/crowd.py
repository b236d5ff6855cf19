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
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import psutil

from benchmarks.control.plane import ROOT, lines, plane, quantile, start_tiny, wait
from tests.support.control_token import bearer

STORED = 10_000
ASKING, STREAMS = 300, 200
EVERY_S = 2.0
SECONDS, SETTLE_S = 60.0, 5.0
RUN_STEPS = 100_000
"""More than any machine takes meanwhile: the run is stopped at the end."""
LOG = "logs/crowd-0.1.log"
LENGTH = re.compile(r"content-length: (\d+)")
LINE = re.compile(rb"sent (\d+\.\d+)")


def bench_crowd() -> dict[str, Any]:
    """Return waiting times by kind of request, and delays of followed lines."""
    from tests.support.tiny_run import make_assets

    with plane(fill=STORED) as control:
        (control.directory / "assets").mkdir()
        run_id, output, _ = start_tiny(control, make_assets(control.directory / "assets"), "followed", RUN_STEPS)
        wait(lambda: len(lines(output)) >= 3, every_s=0.2)
        for worker in json.loads((output / "run.json").read_text())["workers"].values():
            psutil.Process(worker["pid"]).nice(19)
        used, began = control.cpu_s, time.monotonic()
        command = [sys.executable, "-m", "benchmarks.control.crowd", control.url, run_id, str(output / LOG)]
        printed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
        core_fraction = (control.cpu_s - used) / (time.monotonic() - began)
        rss = control.rss_mib
        control.http.post(f"/v1/runs/{run_id}/stop", params={"now": True}).raise_for_status()
    return {
        "stored_runs": STORED, "asking": ASKING, "every_s": EVERY_S, "streams": STREAMS, "seconds": SECONDS,
        **json.loads(printed), "control_core_fraction": round(core_fraction, 3), "rss_mib": round(rss, 1),
        "load": os.getloadavg()[0],
    }  # fmt: skip


class Crowd:
    """Readers over plain sockets.

    Args:
        url: URL of the control plane.
        run_id: Run whose status, curves and logs are read.
        log: Log file of that run, to which this process writes.
    """

    def __init__(self, url: str, run_id: str, log: Path) -> None:
        self.host, _, port = url.removeprefix("http://").partition(":")
        self.port, self.run_id, self.log = int(port), run_id, log
        headers = {"Host": f"{self.host}:{port}"} | bearer()
        self.headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
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
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        if wrong := [error for error in ended if not isinstance(error, asyncio.CancelledError)]:
            raise SystemExit(f"a reader has ended early: {wrong[0]!r}")
        return {"requests": self._requests(), "failed": self.failed, "followed": self._followed()}

    def _everybody(self) -> list[Any]:
        return [*(self.ask(number) for number in range(ASKING)), *(self.follow(number) for number in range(STREAMS))]

    def _requests(self) -> dict[str, Any]:
        return {
            name: {
                "count": len(times), "p50_ms": 1e3 * quantile(times, 0.5), "p99_ms": 1e3 * quantile(times, 0.99),
                "max_ms": 1e3 * max(times),
            }
            for name, times in sorted(self.times.items())
        }  # fmt: skip

    def _followed(self) -> dict[str, Any]:
        every = [delay for delays in self.delays.values() for delay in delays]
        means = sorted(statistics.fmean(delays) for delays in self.delays.values())
        return {
            "lines_each": [min(map(len, self.delays.values())), max(map(len, self.delays.values()))],
            "streams": len(self.delays), "p50_ms": 1e3 * quantile(every, 0.5), "p99_ms": 1e3 * quantile(every, 0.99),
            "max_ms": 1e3 * max(every), "slowest_to_median": means[-1] / statistics.median(means),
        }  # fmt: skip

    async def ask(self, number: int) -> None:
        """Send requests of all kinds in turn, one every `EVERY_S`."""
        draw = Random(number)
        run = f"/v1/runs/{self.run_id}"
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            await asyncio.sleep(draw.uniform(0, EVERY_S))
            while True:
                paths = {
                    "first page": "/v1/runs", "page in the middle": f"/v1/runs?cursor={draw.randrange(STORED)}",
                    "status": run, "curves": f"{run}/metrics", "page of runs": "/",
                    "page of the run": f"/runs/{self.run_id}/live",
                }  # fmt: skip
                name = list(paths)[number % len(paths)]
                number += 1
                began = time.perf_counter()
                writer.write(f"GET {paths[name]} HTTP/1.1\r\n{self.headers}\r\n".encode())
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                length = LENGTH.search(head)
                assert length is not None, head
                await reader.readexactly(int(length[1]))
                if self.recording:
                    self.times[name].append(time.perf_counter() - began)
                    self.failed += " 200 " not in head.split("\r\n")[0]
                await asyncio.sleep(max(0.0, EVERY_S - (time.perf_counter() - began)))
        finally:
            writer.close()

    async def follow(self, number: int) -> None:
        """Follow the run's logs."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            await asyncio.sleep(EVERY_S * number / STREAMS)
            path = f"/v1/runs/{self.run_id}/logs?follow=true&tail=1"
            writer.write(f"GET {path} HTTP/1.1\r\n{self.headers}\r\n".encode())
            while line := await reader.readline():
                sent = LINE.search(line)
                if sent is not None and self.recording:
                    self.delays[number].append(time.time() - float(sent[1]))
            raise ConnectionError("the stream has ended")
        finally:
            writer.close()


def main() -> None:
    """Run the crowd in a process of its own: `URL RUN LOG`."""
    url, run_id, log = sys.argv[1:]
    print(json.dumps(asyncio.run(Crowd(url, run_id, Path(log)).run())))


if __name__ == "__main__":
    main()
