"""Time from `xtoken run` to its first step, and to the answers that start nothing, beside another commit.

    python -m benchmarks.startup demo-out --commit COMMIT

reads the finished files of the demo. Both trees run in turn, `--rounds` times, with the packages of this interpreter;
the other commit's tree is checked out into a temporary directory. The smallest of the rounds counts: everything else
that runs on the machine only adds to a time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks.harness import command_line, write_result
from benchmarks.other_tree import ROOT, checkout, environment

RUN_FILE = "distilled.toml"
POLL_S = 0.02
LIMIT_S = 600.0
STOP_S = 3.0
MUST_S = 8.0
"""Longest time to the first step on two idle cores."""


def command(tree: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start an `xtoken` command of a tree."""
    variables = environment(tree)
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "xtoken_services.cli", *arguments], env=variables, cwd=tree,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def cpu_seconds(process: psutil.Process) -> float:
    """Return the processor time of a process and everything below it that runs."""
    seconds = 0.0
    for each in (process, *process.children(recursive=True)):
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def answer(tree: Path, *arguments: str) -> dict[str, float]:
    """Return the seconds that a command takes which starts no run."""
    began = time.monotonic()
    process = command(tree, *arguments)
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    return {"seconds": time.monotonic() - began, "cpu_seconds": usage.ru_utime + usage.ru_stime}


def first_step(tree: Path, demo: Path, output: Path) -> dict[str, float]:
    """Return the seconds from the command to the first line of `steps.jsonl`, then stop the run.

    Raises:
        RuntimeError: The run ended before, or the line did not come.
    """
    lines = (demo / RUN_FILE).read_text(encoding="utf-8").splitlines()
    file = demo / f"startup-{os.getpid()}.toml"
    file.write_text("\n".join(f'output = "{output}"' if x.startswith("output") else x for x in lines), "utf-8")
    began = time.monotonic()
    process = command(tree, "run", str(file))
    try:
        steps = output / "steps.jsonl"
        while not (steps.is_file() and steps.stat().st_size):
            time.sleep(POLL_S)
            seconds = time.monotonic() - began
            if process.poll() is not None or seconds > LIMIT_S:
                raise RuntimeError(f"{tree}: no first step after {seconds:.0f} s")
        seconds = time.monotonic() - began
        cpu = cpu_seconds(psutil.Process(process.pid))
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # the second signal stops without a checkpoint
            process.wait()
        file.unlink()
    return {"seconds": seconds, "cpu_seconds": cpu}


def measurements(demo: Path, scratch: Path) -> dict[str, Callable[[Path, str], dict[str, float]]]:
    """Return every measurement by name: a function of a tree and a label that no other call has."""
    missing = scratch / "missing.toml"
    missing.write_text((demo / RUN_FILE).read_text(encoding="utf-8").replace('model = "', 'model = "nowhere-'), "utf-8")
    return {
        "help": lambda tree, _: answer(tree, "--help"),
        "misspelt_path": lambda tree, _: answer(tree, "run", str(missing)),
        "first_step_chain": lambda tree, label: first_step(tree, demo, scratch / label),
    }


def smallest(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the smallest value of each metric."""
    return {name: round(min(each[name] for each in rounds), 3) for name in rounds[0]}


def main() -> int:
    """Measure both trees in turn, and write the table as JSON."""
    parser = command_line(__doc__, "startup")
    parser.add_argument("demo", type=Path, help="the directory of a finished `xtoken demo`")
    parser.add_argument("--commit", help="another commit to measure beside this tree")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    demo = arguments.demo.resolve()
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {}
    tree = checkout(arguments.commit) if arguments.commit else nullcontext(ROOT)
    with tempfile.TemporaryDirectory() as scratch, tree as other:
        trees = {"this": ROOT, arguments.commit or "this": other}
        for number in range(arguments.rounds + 1):  # the first writes bytecode and fills the page cache
            for name, measure in measurements(demo, Path(scratch)).items():
                for label, place in trees.items():
                    result = measure(place, f"{label}-{number}")
                    print(f"{number} {name:14} {label:8} " + "  ".join(f"{k} {v:.2f}" for k, v in result.items()))
                    if number:
                        rounds.setdefault(name, {}).setdefault(label, []).append(result)
    document: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)), "load": [round(load, 2) for load in os.getloadavg()],
        "commit": arguments.commit, "rounds": arguments.rounds, "must_s": MUST_S,
        "results": {name: {label: smallest(each) for label, each in of.items()} for name, of in rounds.items()},
    }  # fmt: skip
    write_result(arguments.out, document)
    print(f"written: {arguments.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
