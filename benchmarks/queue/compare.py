"""Ratios of `make bench-queue`, of this tree and of another commit in turn: `python -m benchmarks.queue.compare`.

    python -m benchmarks.queue.compare COMMIT --rounds 5 --out benchmarks/results/queue_compare.json

Each round runs the whole benchmark of both trees once, the one that goes first alternating, and medians are compared.
Between the rounds blocks of requests to the two engines alternate, in processor time, which other load of the machine
disturbs less. The exit status is 1 if a ratio is more than 5% worse than that of the commit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.queue import engine_cost, ours
from benchmarks.queue.__main__ import ROUNDS, machine, rounded
from benchmarks.queue.bounds import queue_bounds

ROOT = ours.ROOT
RESULT = ROOT / "benchmarks" / "results" / "queue_compare.json"
ENGINE = Path(engine_cost.__file__)
WORST = 0.95
BLOCKS = 60
"""Blocks of requests per workload and tree in each round."""
WARM_BLOCKS = 3
SIDES = ("commit", "here")


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Yield a directory with the files of a commit."""
    with tempfile.TemporaryDirectory(prefix="xc-") as name:
        tree = Path(name) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(tree), commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def environment(tree: Path) -> dict[str, str]:
    """Return the environment in which Python imports from a tree."""
    return os.environ | {"PYTHONPATH": str(tree)}


def benchmark(tree: Path, out: Path) -> dict[str, Any]:
    """Run the whole benchmark of a tree with one round, and return its result."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.queue",
        "--rounds",
        "1",
        "--out",
        str(out),
        "--transferqueue",
        str(out.with_name("none")),
    ]
    subprocess.run(command, cwd=tree, env=environment(tree), stdout=subprocess.DEVNULL, check=False)
    if not out.exists():
        raise SystemExit(f"the benchmark of {tree} failed, see above")
    result: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    return result


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """Return every bound that is relative to something measured in the same run, larger being better."""
    found = {}
    for bound in queue_bounds(result):
        if "relative to" in bound.what and bound.value:
            found[bound.what] = 1 / bound.value if bound.most else bound.value
    return found


def engine_blocks(trees: dict[str, Path], blocks: int) -> dict[str, list[float]]:
    """Return the speed of this tree's engine relative to the commit's by workload and call, for pairs of blocks."""
    workers = {
        side: subprocess.Popen(
            [sys.executable, str(ENGINE)], cwd=tree, env=environment(tree),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for side, tree in trees.items()
    }  # fmt: skip
    found: dict[str, list[float]] = {}
    for name in engine_cost.REQUESTS:
        for number in range(WARM_BLOCKS + blocks):
            block = {side: _block(workers[side], name) for side in (SIDES if number % 2 else SIDES[::-1])}
            for call in engine_cost.CALLS if number >= WARM_BLOCKS else ():
                found.setdefault(f"engine, {call}, {name}", []).append(block["commit"][call] / block["here"][call])
    for worker in workers.values():
        worker.communicate()
    return found


def _block(worker: subprocess.Popen[str], name: str) -> dict[str, float]:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(f"{name}\n")
    worker.stdin.flush()
    answer: dict[str, float] = json.loads(worker.stdout.readline())
    return answer


def compare(commit: str, rounds: int, blocks: int) -> dict[str, Any]:
    """Measure both trees."""
    start = time.perf_counter()
    measured: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    engines: dict[str, list[float]] = {}
    with checkout(commit) as tree:
        trees = {"commit": tree, "here": ROOT}
        for number in range(max(rounds, 1)):
            for side in SIDES if number % 2 else SIDES[::-1] if rounds else ():
                measured[side].append(ratios(benchmark(trees[side], tree.parent / "result.json")))
            for name, values in engine_blocks(trees, blocks).items():
                engines.setdefault(name, []).extend(values)
    rows = []
    for name in measured["here"][0] if rounds else ():
        medians = {side: statistics.median(one[name] for one in measured[side]) for side in SIDES}
        rows.append({"what": name, **medians, "of_commit": medians["here"] / medians["commit"]})
    rows += [{"what": name, "of_commit": statistics.median(values)} for name, values in engines.items()]
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    return {
        "taken_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "machine": machine(),
        "commit": commit, "here": head.stdout.strip(), "rounds": rounds, "blocks": blocks,
        "ratios": rows, "worst": min(row["of_commit"] for row in rows), "took_s": time.perf_counter() - start,
    }  # fmt: skip


def main() -> int:
    """Compare, write the result, print each ratio; 1 if one is more than 5% worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="of the whole benchmark; 0 compares the engines only"
    )
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of requests per engine, workload and round")
    parser.add_argument("--out", type=Path, default=RESULT, help="where the JSON goes")
    options = parser.parse_args()
    result = rounded(compare(options.commit, options.rounds, options.blocks))
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["ratios"]:
        print(f"{'holds' if row['of_commit'] >= WORST else 'fails'}  {row['of_commit']:.3f}  {row['what']}")
    return 0 if result["worst"] >= WORST else 1


if __name__ == "__main__":
    raise SystemExit(main())
