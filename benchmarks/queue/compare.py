"""Ratios of `make bench-queue`, of this tree and of another commit in turn: `python -m benchmarks.queue.compare`.

    python -m benchmarks.queue.compare COMMIT --rounds 5 --out benchmarks/results/queue_compare.json
    python -m benchmarks.queue.compare COMMIT --directory DIR   # its files, where there is no repository

Each round runs the whole benchmark of both trees once, the one that goes first alternating, and medians are compared.
Between the rounds blocks of requests to the two engines alternate, in processor time, which other load of the machine
disturbs less. The result file is written after every round. The exit status is 1 if a ratio is more than 5% worse than
that of the commit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.queue import engine_cost, ours
from benchmarks.queue.__main__ import ROUNDS, machine, rounded
from benchmarks.queue.bounds import queue_bounds
from xtoken_core.atomic import atomic_write

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
    """Return the environment in which Python imports from a tree, and packages from where they are now."""
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != ROOT]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), *others])}


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


def compare(commit: str, directory: Path, here: str, rounds: int, blocks: int) -> Iterator[dict[str, Any]]:
    """Measure both trees, and yield the result of all rounds so far after each.

    Args:
        commit: Name of the other commit.
        directory: Its files.
        here: Name of the commit of this tree.
        rounds: Rounds of the whole benchmark; 0 compares the engines only.
        blocks: Blocks of requests to the engines, per workload, tree and round.
    """
    start = time.perf_counter()
    described = {
        "taken_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "machine": machine(),
        "versions": {"python": platform.python_version(), "pyzmq": version("pyzmq")},
        "commit": commit, "here": here, "blocks": blocks,
    }  # fmt: skip
    measured: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    engines: dict[str, list[float]] = {}
    trees = {"commit": directory, "here": ROOT}
    with tempfile.TemporaryDirectory(prefix="xc-") as name:
        for number in range(max(rounds, 1)):
            for side in SIDES if number % 2 else SIDES[::-1] if rounds else ():
                measured[side].append(ratios(benchmark(trees[side], Path(name) / "result.json")))
            for what, values in engine_blocks(trees, blocks).items():
                engines.setdefault(what, []).extend(values)
            rows = compared(measured) + [
                {"what": what, "of_commit": statistics.median(values)} for what, values in engines.items()
            ]
            yield described | {
                "rounds": len(measured["here"]), "ratios": rows, "worst": min(row["of_commit"] for row in rows),
                "took_s": time.perf_counter() - start,
            }  # fmt: skip


def compared(measured: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return the medians of each ratio over the rounds by side, and how they compare."""
    rows = []
    for name in measured["here"][0] if measured["here"] else ():
        medians = {side: statistics.median(one[name] for one in measured[side]) for side in SIDES}
        rounds = {side: [one[name] for one in measured[side]] for side in SIDES}
        rows.append({"what": name, **medians, "of_commit": medians["here"] / medians["commit"], "rounds": rounds})
    return rows


def this_commit() -> str:
    """Return the commit of this tree."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Compare, write the result, print each ratio; 1 if one is more than 5% worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--directory", type=Path, help="with the files of that commit; default: git checks it out")
    parser.add_argument("--here", help="name of this tree's commit; default: git's answer")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="of the whole benchmark; 0 compares the engines only"
    )
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of requests per engine, workload and round")
    parser.add_argument("--out", type=Path, default=RESULT, help="where the JSON goes")
    options = parser.parse_args()
    given, here = options.directory, options.here or this_commit()
    with nullcontext(given.resolve()) if given else checkout(options.commit) as directory:
        for one in compare(options.commit, directory, here, options.rounds, options.blocks):
            result = rounded(one)
            atomic_write(options.out, json.dumps(result, indent=1) + "\n")
    for row in result["ratios"]:
        print(f"{'holds' if row['of_commit'] >= WORST else 'fails'}  {row['of_commit']:.3f}  {row['what']}")
    return 0 if result["worst"] >= WORST else 1


if __name__ == "__main__":
    raise SystemExit(main())
