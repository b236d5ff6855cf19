"""Write the control plane's figures into `docs/performance.md`, from the JSON of the benchmark.

    python -m benchmarks.control.page [--check]

With `--check` nothing is written: the exit status says whether the page is up to date.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import pages

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "control.json"
PAGE = ROOT / "docs" / "performance.md"
START, END = "<!-- control: written by benchmarks/control/page.py -->", "<!-- end of control -->"
LIST_MS, FIRST_STEP_S, SLOWER = 20.0, 20.0, 0.03


def figures(result: dict[str, Any]) -> str:
    """The generated part of the page."""
    return "\n".join([START, *_told(result), "", *_bounds(result), END])


def rendered() -> str:
    """The page as the result file wants it."""
    return pages.with_part(PAGE, START, END, figures(json.loads(RESULT.read_text(encoding="utf-8"))))


def _told(result: dict[str, Any]) -> Iterator[str]:
    listed = result["list"]
    yield f"Taken {listed['at']} on {listed['machine']}."
    yield ""
    yield f"| `GET /v1/runs`, {listed['stored_runs']:,} stored runs | p50 | p99 |"
    yield "|---|---|---|"
    for name, times in listed.items():
        if isinstance(times, dict):
            yield f"| {name} | {times['p50_ms']:.1f} ms | {times['p99_ms']:.1f} ms |"
    yield ""
    first = result["first-step"]
    yield (
        f"From `POST /v1/runs` to the first optimiser step of a tiny run: "
        f"{', '.join(f'{seconds:.1f}' for seconds in first['seconds'])} s."
    )
    if "rss_mib" in listed:
        yield f"The control plane's process takes {listed['rss_mib']:.0f} MiB with that list."
    if "readers" in result:
        yield ""
        yield from _readers(result["readers"])
    if "windows" in result:
        yield ""
        yield from _windows(result["windows"])


def _readers(found: dict[str, Any]) -> Iterator[str]:
    # Results from before 2026-11-22 also had clients of an event stream that has been removed since.
    streams = f", and {found['streams']} streams of events" if "streams" in found else ""
    yield (
        f"{found['readers']} readers, each asking every {found['every_s']:g} s{streams}, beside {found['steps']:,} "
        f"steps of training on one core of {found['machine']}:"
    )
    yield ""
    yield "| | median | each run |"
    yield "|---|---|---|"
    for name, key in (("alone", "alone_s"), ("with readers", "read_s")):
        each = ", ".join(f"{seconds:.2f}" for seconds in found[key])
        yield f"| training {name} | {statistics.median(found[key]):.2f} s | {each} |"
    loads = found["load"]
    yield ""
    yield (
        f"The runs alone differ by {found['spread_alone']:.1%} among themselves. In a run with readers "
        f"{min(load['requests'] for load in loads):,} to {max(load['requests'] for load in loads):,} requests were "
        f"answered, {sum(load['failed'] for load in loads)} refused, in {_range(loads, 'p50_ms')} ms (p50) and "
        f"{_range(loads, 'p99_ms')} ms (p99); the control plane took {_range(loads, 'control_core_share', 100)} % of "
        "its core, which it shared with the readers."
    )


def _windows(found: dict[str, Any]) -> Iterator[str]:
    low, high = found["interval"]
    yield (
        f"One run whose readers came and went every {found['window_s']:g} s, {len(found['read_s'])} times, on "
        f"{found['machine']}: beside its neighbours without readers, a window with them had steps that took "
        f"{found['slower']:+.1%} (median over windows; 95% interval {low:+.1%} to {high:+.1%}). Windows without "
        f"readers had steps of {min(found['alone_s']) * 1e3:.1f} to {max(found['alone_s']) * 1e3:.1f} ms on average."
    )


def _range(loads: list[dict[str, Any]], key: str, times: float = 1.0) -> str:
    values = [load[key] * times for load in loads]
    return f"{min(values):.1f} to {max(values):.1f}"


def _bounds(result: dict[str, Any]) -> Iterator[str]:
    worst = max(times["p99_ms"] for times in result["list"].values() if isinstance(times, dict))
    rows = [
        ("`GET /v1/runs`, the slowest p99, ms", worst, LIST_MS),
        ("`POST` to the first step, the slowest, s", max(result["first-step"]["seconds"]), FIRST_STEP_S),
    ]
    if "readers" in result:
        rows.append(("training slowed by readers, share, by runs", result["readers"]["slower"], SLOWER))
    if "windows" in result:
        rows.append(("training slowed by readers, share, by windows", result["windows"]["slower"], SLOWER))
    yield "| it must show | this run | limit | |"
    yield "|---|---|---|---|"
    for name, value, limit in rows:
        yield f"| {name} | {value:.4g} | at most {limit:g} | {'holds' if value <= limit else 'fails'} |"
    for name, part in (("runs", "readers"), ("windows", "windows")):
        if part not in result:
            yield f"| training slowed by readers, share, by {name} | not measured | at most {SLOWER:g} | |"


def main() -> int:
    """Write the page, or say whether it is up to date."""
    return pages.command(__doc__, lambda: {PAGE: rendered()})


if __name__ == "__main__":
    raise SystemExit(main())
