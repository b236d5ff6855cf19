"""Measure in what fraction of a run's time the GPU runs a kernel: `python -m benchmarks.kernel_share`.

A variant of `benchmarks.end_to_end` runs through its processes. After the warm-up, for some seconds, teacher and
trainer record their kernels by torch's profiler and sample where their main threads are. The fraction is that of the
union of both processes' kernels. Workers are started as programs, since a fork server's children have no such thread.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.__main__ import _machine, parsed
from benchmarks.end_to_end.assets import make_assets, with_lengths
from benchmarks.end_to_end.pipeline import pipeline
from benchmarks.end_to_end.variants import VARIANTS, run_spec
from benchmarks.lengths import DISTRIBUTIONS

ROOT = Path(__file__).parents[2]
HOOK = Path(__file__).parent / "hook"
WORKERS = 2
"""One teacher and one trainer are profiled."""
POLL_S = 0.05
MOST_KERNELS, MOST_STACKS = 12, 12
COPIES = ("Memcpy", "Memset")
Interval = tuple[int, int]


def union(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Return the union of some intervals within a window, in order, without overlaps."""
    joined: list[Interval] = []
    for begin, end in sorted((max(b, window[0]), min(e, window[1])) for b, e in intervals):
        if begin >= end:
            continue
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def fraction(intervals: Iterable[Interval], window: Interval) -> float:
    """Return the fraction of a window in which at least one interval lies."""
    return sum(end - begin for begin, end in union(intervals, window)) / (window[1] - window[0])


def gaps(intervals: Iterable[Interval], window: Interval) -> dict[str, float]:
    """Return the fraction of a window in gaps between intervals, by the gaps' length."""
    ends = [(window[0], window[0]), *union(intervals, window), (window[1], window[1])]
    lengths = [after[0] - before[1] for before, after in pairwise(ends)]
    limits = {"below 0.02 ms": (0, 20_000), "0.02 to 1 ms": (20_000, 1_000_000), "1 ms and more": (1_000_000, 1 << 62)}
    whole = window[1] - window[0]
    return {name: sum(x for x in lengths if low <= x < high) / whole for name, (low, high) in limits.items()}


def summary(reports: Sequence[dict[str, Any]], window: Interval) -> dict[str, Any]:
    """Return the figures of a window from the workers' reports."""
    kernels, everything = [], []
    workers: dict[str, Any] = {}
    for report in reports:
        own: list[Interval] = []
        times: dict[str, float] = {}
        for name, intervals in report["kernels"].items():
            pairs = [(begin, end) for begin, end in intervals]
            everything += pairs
            if name.startswith(COPIES):
                continue
            own += pairs
            clipped = sum(max(0, min(end, window[1]) - max(begin, window[0])) for begin, end in pairs)
            times[name[:100]] = times.get(name[:100], 0.0) + clipped / 1e6
        kernels += own
        longest = dict(sorted(times.items(), key=lambda item: -item[1])[:MOST_KERNELS])
        samples = sum(report["stacks"].values()) or 1
        stacks = {name: count / samples for name, count in list(report["stacks"].items())[:MOST_STACKS]}
        workers[report["role"]] = {
            "fraction": fraction(own, window),
            "kernels": sum(1 for begin, _ in own if window[0] <= begin < window[1]),
            "longest_ms": {name: round(ms, 3) for name, ms in longest.items()},
            "core_fraction": report["cpu_seconds"] / report["seconds"],
            "main_thread": {name: round(part, 4) for name, part in stacks.items()},
        }
    return {
        "window_s": (window[1] - window[0]) / 1e9,
        "fraction": fraction(kernels, window),
        "fraction_with_copies": fraction(everything, window),
        "gaps": gaps(kernels, window),
        "workers": workers,
    }


class Watcher(threading.Thread):
    """Opens and closes the workers' window while the run goes on.

    Args:
        steps: The run's `steps.jsonl`.
        folder: Where the workers look for `start` and `stop`, and write.
        warmup: Steps before the window.
        seconds: Length of the window.
    """

    def __init__(self, steps: Path, folder: Path, warmup: int, seconds: float) -> None:
        super().__init__(daemon=True)
        self._steps, self._folder = steps, folder
        self._warmup, self._seconds = warmup, seconds
        self.window: Interval | None = None
        self.tokens_per_second: float | None = None

    def run(self) -> None:
        """Wait for the warm-up and for both profilers, then for one more step, which has their start in it."""
        self._wait_for(self._warmup)
        (self._folder / "start").touch()
        while len(list(self._folder.glob("*.ready"))) < WORKERS:
            time.sleep(POLL_S)
        first = self._wait_for(len(self._rows()) + 1)
        began = time.time_ns()
        time.sleep(self._seconds)
        ended = time.time_ns()
        (self._folder / "stop").touch()
        rows = [row for row in self._rows()[first - 1 :] if row["time"] * 1e9 <= ended]
        if len(rows) > 1:
            tokens = sum(row["tokens"] for row in rows[1:])
            self.tokens_per_second = tokens / (rows[-1]["time"] - rows[0]["time"])
        self.window = began, ended

    def _rows(self) -> list[dict[str, Any]]:
        if not self._steps.exists():
            return []
        lines = self._steps.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _wait_for(self, count: int) -> int:
        while (found := len(self._rows())) < count:
            time.sleep(POLL_S)
        return found


def main() -> int:
    """Run, merge, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "kernel_share.json")
    parser.add_argument("--work", type=Path, help="models and text of benchmarks.end_to_end (runs/end-to-end)")
    parser.add_argument("--variant", choices=VARIANTS, default="small_fixed")
    parser.add_argument("--steps", type=int, default=12, help="after the warm-up")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of the window")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for the run")
    parser.add_argument("--go-on", action="store_true", help="add to the result file")
    parser.add_argument("--small", action="store_true", help="thin models: to try this file on a CPU")
    parser.add_argument("--samples", type=int, default=128, help=argparse.SUPPRESS)
    parser.add_argument("--context", type=int, default=2048, help=argparse.SUPPRESS)
    own = parser.parse_args()
    shared = ["--steps", str(own.steps), "--warmup", str(own.warmup), "--samples", str(own.samples)]
    shared += ["--context", str(own.context), *(["--small"] if own.small else [])]
    arguments = parsed([*shared, *(["--work", str(own.work)] if own.work else [])])
    variant, work = VARIANTS[own.variant], arguments.work
    spec = run_spec(variant, arguments)
    if own.small:
        spec["train"]["samples_per_step"] = own.samples
    count = spec["train"]["samples_per_step"] * (own.steps + own.warmup)
    assets = make_assets(work, small=own.small, documents=count, characters=6 * own.context, pair=variant.pair)
    if variant.lengths:
        assets = with_lengths(assets, DISTRIBUTIONS[variant.lengths], documents=count, seed=arguments.seed)
    directory, folder = work / f"kernel-share-{own.variant}", (work / f"profile-{own.variant}-{os.getpid()}").absolute()
    folder.mkdir(parents=True)
    path = os.pathsep.join(filter(None, (str(HOOK), os.environ.get("PYTHONPATH", str(ROOT)))))
    env = {"PYTHONPATH": path, "XTOKEN_FORK": "0", "XTOKEN_KERNEL_SHARE": str(folder)}
    watcher = Watcher(directory / "out" / "steps.jsonl", folder, own.warmup, own.seconds)
    watcher.start()
    found = pipeline(assets, spec, directory=directory, warmup=own.warmup, timeout_s=own.timeout, env=env)
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    if watcher.window is None or len(reports) < WORKERS:
        print(f"the run ended before its window did ({len(reports)} reports): give it more --steps", file=sys.stderr)
        return 1
    entry = {
        **summary(reports, watcher.window),
        "tokens_per_second": found["tokens_per_second"],
        "tokens_per_second_in_window": watcher.tokens_per_second,
        "samples": spec["train"]["samples_per_step"], "steps": own.steps, "warmup": own.warmup,
    }  # fmt: skip
    fresh: dict[str, Any] = {"machine": _machine(), "variants": {}}
    before = json.loads(own.out.read_text(encoding="utf-8")) if own.go_on and own.out.exists() else fresh
    report = before if before["machine"] == fresh["machine"] else fresh
    report["variants"][own.variant] = entry
    own.out.parent.mkdir(parents=True, exist_ok=True)
    own.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    rate, part = found["tokens_per_second"], entry["fraction"]
    print(f"{own.variant}: a kernel runs {part:.1%} of {entry['window_s']:.1f} s, {rate:,.0f} tokens/s")
    for role, worker in entry["workers"].items():
        print(f"{role}: {worker['fraction']:.1%}, {worker['kernels']} kernels, {worker['core_fraction']:.2f} cores")
        for name, ms in list(worker["longest_ms"].items())[:5]:
            print(f"    {ms:9.1f} ms  {name}")
        for name, part in list(worker["main_thread"].items())[:5]:
            print(f"    {part:9.1%}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
