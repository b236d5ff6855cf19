"""Ratios of `make bench-queue`, of this tree and of another commit in turn: `python -m benchmarks.queue.compare`.

    python -m benchmarks.queue.compare COMMIT --rounds 5 --out benchmarks/results/queue_compare.json

Each round starts processes for the commit, for the commit again and for this tree, and has them measure the same parts
one after the other, a different one first each time: rates, journal and crowd as wholes, single calls in
short blocks. So whatever else the machine does changes little between measurements that are compared. A
ratio is the median over the rounds of this tree relative to the commit; that of the commit to itself shows how much of
it is chance. Processor time of single calls is compared as well. The result file is written after every round. The exit
status is 1 if a ratio is more than 5% worse than that of the commit.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.harness import command_line, write_result
from benchmarks.other_tree import ROOT, checkout, environment
from benchmarks.queue import source_tree
from benchmarks.queue.__main__ import IN_FLIGHT, ROUNDS, TRANSPORTS, machine, rounded
from benchmarks.queue.bounds import queue_bounds
from benchmarks.queue.workload import quantiles

WORST = 0.95
BLOCKS = 30
"""Blocks of calls per size and side in each round."""
WARM_BLOCKS = 3
COMMIT, AGAIN, HERE = SIDES = ("commit", "commit again", "here")
RATES = [f"{transport}_{in_flight}" for transport in TRANSPORTS for in_flight in IN_FLIGHT]
UNCOMPARED = {"transferqueue": {"skipped": "not compared"}, "idle": {"idle_pss_mib": 0.0, "idle_core_share": 0.0}}

Round = dict[str, dict[str, float]]
"""Figures by side and name, larger being better."""


class Sides:
    """A measuring process for each side.

    Args:
        trees: Directory of each side's files.
    """

    def __init__(self, trees: dict[str, Path]) -> None:
        command = [sys.executable, source_tree.__file__]
        self._processes = {
            side: subprocess.Popen(
                command, cwd=tree, env=environment(tree), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True,
            )
            for side, tree in trees.items()
        }  # fmt: skip
        self._turn = 0

    def measure(self, what: str) -> dict[str, Any]:
        """Return each side's answer, requested one after the other."""
        self._turn += 1
        first = self._turn % len(SIDES)
        return {side: self._ask(side, what) for side in (*SIDES[first:], *SIDES[:first])}

    def close(self) -> None:
        """End the processes."""
        for process in self._processes.values():
            process.communicate()

    def _ask(self, side: str, what: str) -> dict[str, Any]:
        process = self._processes[side]
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{what}\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"{side}: cannot measure {what}: run {source_tree.__file__} in its tree to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure_round(sides: Sides, blocks: int) -> Round:
    """Return the figures of each side, all measured once."""
    results: dict[str, dict[str, Any]] = {
        side: {"ours": {}, "plain": {}, "latency": {}, **UNCOMPARED} for side in SIDES
    }
    figures = single_calls(sides, blocks, results)
    for key in RATES:
        for side, answer in sides.measure(f"rates {key}").items():
            results[side]["ours"][key], results[side]["plain"][key] = answer["ours"], answer["plain"]
    for part in ("journal", "crowd"):
        for side, answer in sides.measure(part).items():
            results[side][part] = answer
    for side in SIDES:
        figures[side] |= ratios(results[side])
    return figures


def single_calls(sides: Sides, blocks: int, results: dict[str, dict[str, Any]]) -> Round:
    """Measure single calls; add their latencies to the results and return calls per second of processor time."""
    figures: Round = {side: {} for side in SIDES}
    for size in source_tree.SIZES:
        answers = [sides.measure(f"calls {size}") for _ in range(WARM_BLOCKS + blocks)][WARM_BLOCKS:]
        for side in SIDES:
            for call in answers[0][side]["seconds"]:
                seconds = [one for answer in answers for one in answer[side]["seconds"][call]]
                results[side]["latency"][f"{size}_{call}"] = quantiles(seconds)
            for call, used in answers[0][side]["processor_us"].items():
                for process in used:
                    spent = statistics.median(one[side]["processor_us"][call][process] for one in answers)
                    if spent:
                        figures[side][f"{call} of one {size} sample, processor time of the {process}"] = 1e6 / spent
    return figures


def compare(commit: str, directory: Path, here: str, rounds: int, blocks: int) -> Iterator[dict[str, Any]]:
    """Measure both trees, and yield the result of all rounds so far after each.

    Args:
        commit: Name of the other commit.
        directory: Its files.
        here: Name of the commit of this tree.
        rounds: Number of rounds.
        blocks: Blocks of calls per size, side and round.
    """
    start = time.perf_counter()
    described = {
        "taken_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "machine": machine(),
        "versions": {"python": platform.python_version(), "pyzmq": version("pyzmq")},
        "commit": commit, "here": here, "blocks": blocks,
    }  # fmt: skip
    measured: list[Round] = []
    for _ in range(rounds):
        sides = Sides({COMMIT: directory, AGAIN: directory, HERE: ROOT})
        try:
            measured.append(measure_round(sides, blocks))
        finally:
            sides.close()
        rows = compared(measured)
        yield described | {
            "rounds": len(measured), "ratios": rows, "worst": min(row["of_commit"] for row in rows),
            "worst_of_itself": min(row["of_itself"] for row in rows), "took_s": time.perf_counter() - start,
        }  # fmt: skip


def compared(measured: list[Round]) -> list[dict[str, Any]]:
    """Return each figure of this tree relative to the commit's, and the commit's relative to itself.

    Returns:
        Rows with medians over the rounds and the quotients of each round.
    """
    rows = []
    for name in measured[0][HERE]:
        here, again = ([one[side][name] / one[COMMIT][name] for one in measured] for side in (HERE, AGAIN))
        medians = {side: statistics.median(one[side][name] for one in measured) for side in (COMMIT, HERE)}
        rows.append(
            {
                "what": name, **medians, "of_commit": statistics.median(here), "of_itself": statistics.median(again),
                "rounds": {"of_commit": here, "of_itself": again},
            }
        )  # fmt: skip
    return rows


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """Return every bound that is relative to something measured in the same run, larger being better."""
    bounds = (bound for bound in queue_bounds(result) if "relative to" in bound.what and bound.value)
    return {bound.what: 1 / bound.value if bound.most else bound.value for bound in bounds}  # type: ignore[operator,misc]


def main() -> int:
    """Compare, write the result, print each ratio; 1 if one is more than 5% worse."""
    parser = command_line(__doc__, "queue_compare")
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often everything is measured")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of calls per size, side and round")
    options = parser.parse_args()
    here = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    with checkout(options.commit) as directory:
        for one in compare(options.commit, directory, here, options.rounds, options.blocks):
            result = rounded(one)
            write_result(options.out, result)
    for row in result["ratios"]:
        print(
            f"{'holds' if row['of_commit'] >= WORST else 'fails'}  {row['of_commit']:.3f}  "
            f"(itself {row['of_itself']:.3f})  {row['what']}"
        )
    return 0 if result["worst"] >= WORST else 1


if __name__ == "__main__":
    raise SystemExit(main())
