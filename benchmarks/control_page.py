"""Write the control plane's figures into `docs/performance.md`, from the JSON of the benchmark.

    python -m benchmarks.control_page [--check]

With `--check` nothing is written: the exit status says whether the page is up to date.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "control.json"
PAGE = ROOT / "docs" / "performance.md"
START, END = "<!-- control: written by benchmarks/control_page.py -->", "<!-- end of control -->"
LIST_MS, FIRST_STEP_S, SLOWER = 20.0, 20.0, 0.03


def figures(result: dict[str, Any]) -> str:
    """The generated part of the page."""
    return "\n".join([START, *_told(result), "", *_bounds(result), END])


def rendered() -> str:
    """The page as the result file wants it."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    return before + figures(json.loads(RESULT.read_text(encoding="utf-8"))) + after


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


def _readers(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{found['readers']} readers, each asking every {found['every_s']:g} s, and {found['streams']} streams of "
        f"events, beside {found['steps']:,} steps of training:"
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
        rows.append(("training slowed by readers, share", result["readers"]["slower"], SLOWER))
    yield "| it must show | this run | limit | |"
    yield "|---|---|---|---|"
    for name, value, limit in rows:
        yield f"| {name} | {value:.4g} | at most {limit:g} | {'holds' if value <= limit else 'fails'} |"
    if "readers" not in result:
        yield "| training slowed by readers, share | not measured | at most 0.03 | |"


def main() -> int:
    """Write the page, or say whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    text = rendered()
    if parser.parse_args().check:
        return int(text != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
