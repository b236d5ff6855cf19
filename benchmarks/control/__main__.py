"""The control plane: `python -m benchmarks.control list first-step windows crowd` (all four if none is named).

They take half a minute, a minute, seven minutes, two minutes; `python -m benchmarks.pages` then renders
the pages.

`list`: `GET /v1/runs` with 10,000 stored runs. `first-step`: from `POST /v1/runs` to the first optimiser step of a
tiny run of two tokenizers. `windows`: how much 200 readers, each asking every 2 s, slow that run's training while they
are there, every worker of the run on one core, control plane, readers and this process on another. `crowd`: waiting
times of 500 readers, of whom 200 follow a run's logs, with 10,000 stored runs. Results go to
`benchmarks/results/control.json`, each part replacing its last one.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from typing import Any

from benchmarks.control.crowd import bench_crowd
from benchmarks.control.plane import plane, quantiles, start_tiny, tiny_assets, wait
from benchmarks.control.readers import bench_windows
from benchmarks.harness import command_line, write_result

STORED = 10_000
REQUESTS = 2_000


def bench_list() -> dict[str, Any]:
    """Measure `GET /v1/runs` in milliseconds, one request after the other over one connection."""
    found: dict[str, Any] = {"stored_runs": STORED, "requests_of_each": REQUESTS}
    queries = {"first page": {}, "page in the middle": {"cursor": STORED // 2}, "failed ones": {"state": "failed"}}
    with plane(fill=STORED) as there:
        for name, params in queries.items():
            times = []
            for number in range(REQUESTS + 50):
                began = time.perf_counter()
                answer = there.http.get("/v1/runs", params=params)
                assert answer.status_code == 200 and len(answer.json()["runs"]) == 50
                if number >= 50:
                    times.append(time.perf_counter() - began)
            found[name] = quantiles(times)
        found["rss_mib"] = round(there.rss_mib, 1)
    return found


def bench_first_step() -> dict[str, Any]:
    """Measure seconds from the POST until the first optimiser step is written down; models and tokenizers are there."""
    seconds = []
    with plane() as there:
        assets = tiny_assets(there)
        for number in range(3):
            run_id, output, began = start_tiny(there, assets, f"first-{number}", 10)
            wait(lambda output=output: (output / "steps.jsonl").exists() and (output / "steps.jsonl").stat().st_size)
            seconds.append(time.perf_counter() - began)
            wait(lambda run_id=run_id: there.http.get(f"/v1/runs/{run_id}").json()["state"] == "completed")
    return {"seconds": [round(value, 2) for value in seconds], "median_s": round(statistics.median(seconds), 2)}


def main() -> None:
    """Run the parts that are named and keep their results."""
    parser = command_line(__doc__, "control")
    parts = {
        "list": bench_list, "first-step": bench_first_step, "windows": bench_windows,
        "crowd": bench_crowd,
    }  # fmt: skip
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}")
    options = parser.parse_args()
    if set(options.parts) - set(parts):
        parser.error(f"the parts are {', '.join(parts)}")
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.parts or parts:
        known[name] = parts[name]() | {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "at": time.strftime("%F"),
        }
        print(json.dumps({name: known[name]}, indent=2), flush=True)
        write_result(options.out, known)


if __name__ == "__main__":
    main()
