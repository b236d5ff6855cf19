"""The same training through xtoken's own processes: queue, collators, teacher, trainer, started by `xtoken run`.

Its steps are read while it runs, and some are printed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.end_to_end.assets import Assets
from xtoken_core.config.loss import PAIR_KINDS, LossConfig

TEACHER_MEMORY = re.compile(r"memory at most (\d+) bytes, (\d+) of them weights; ring (\d+) bytes")
"""What a teacher on a GPU logs when its ring closes."""
LEAST_STEPS = 5
"""Steps after the warm-up that make a figure where a run is cut short."""
POLL_S = 0.2
FINISH_S = 60.0
"""The run is ended so long after its last step: it then writes a checkpoint and the model, which no figure needs."""
TAIL = 24
"""Lines of each log that an error has."""
FRAMES = ("/typer/", "<frozen runpy>", "Extension modules:")
EVERY = 5
"""Steps between two lines of the output."""
PARTS = ("data_wait", "teacher_wait", "forward_seconds", "loss_seconds", "backward_seconds")


def pipeline(
    assets: Assets,
    spec: dict[str, Any],
    *,
    directory: Path,
    warmup: int,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    partial: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Run a RunSpec to its end and read its own records.

    Args:
        assets: What it reads.
        spec: The run, as plain values, without models, text and output.
        directory: Its output, emptied first.
        warmup: Steps at the beginning that do not count.
        timeout_s: The whole run is ended after so long; steps that it has done by then count.
        env: Variables that its processes have beyond this one's.
        partial: Takes the figures of the steps so far, now and then while it runs.

    Returns:
        Unpadded student tokens per wall second after the warm-up; medians of every number in `steps.jsonl`; seconds
        from the command to the first step's end; and rank 0's peaks of memory in bytes: the
        trainer's above parameters, gradients and moments, which all are bfloat16, its teacher's above its weights, and
        the ring's.

    Raises:
        RuntimeError: The run failed; its last lines are in the text.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "run.toml").write_text(tomli_w.dumps(complete(spec, assets, directory / "out")), encoding="utf-8")
    rows: list[dict[str, Any]] = []
    began, told = time.time(), 0

    def figures() -> dict[str, Any]:
        found = _figures(rows, warmup, ranks=spec["workers"].get("ranks", 1), student=assets.student)
        return {"command_to_first_step_s": rows[0]["time"] - began, **found}

    def follow() -> bool:
        nonlocal told
        known = len(rows)
        rows[:] = step_rows(directory / "out")
        for row in rows[known:]:
            _print_step(row, began)
        if len(rows) - warmup >= told + LEAST_STEPS:
            told = len(rows) - warmup
            partial(figures())
        return len(rows) >= spec["train"]["max_steps"]

    code = run_command(directory, timeout_s, env, follow)
    follow()
    for weights in ("checkpoints", "model"):  # ten gigabytes, and no reader
        shutil.rmtree(directory / "out" / weights, ignore_errors=True)
    least = {0: 1, None: LEAST_STEPS}  # killed: the steps before count
    if code not in least or len(rows) < warmup + least[code]:
        outcome = f"was not done after {timeout_s:g} s," if code is None else f"ended with {code}"
        raise RuntimeError(f"xtoken run {outcome} after {len(rows)} steps:\n" + tail(directory))
    return {**figures(), **_teacher_memory(directory / "out" / "logs")}


def _print_step(row: dict[str, Any], began: float) -> None:
    """Print the first steps, and every `EVERY`th."""
    if row["step"] < 2 or row["step"] % EVERY == EVERY - 1:
        parts = ", ".join(f"{name} {row[name]:.3f}" for name in PARTS if name in row)
        print(f"{row['time'] - began:6.1f} s  step {row['step'] + 1}: {row['seconds']:.3f} s ({parts})", flush=True)


def _figures(rows: list[dict[str, Any]], warmup: int, *, ranks: int, student: Path) -> dict[str, Any]:
    """Return the figures of the steps after the warm-up, as many as there are."""
    kept = rows[warmup:]
    numbers = {name for row in kept for name, value in row.items() if isinstance(value, float)}
    state = 4 * sum(file.stat().st_size for file in student.glob("*.safetensors")) // ranks
    before = rows[warmup - 1]["time"] if warmup else rows[0]["time"] - rows[0]["seconds"]
    return {
        "tokens_per_second": sum(row["tokens"] for row in kept) / (kept[-1]["time"] - before),
        "median": {name: statistics.median(row[name] for row in kept if name in row) for name in sorted(numbers)},
        "peak_bytes_above_state": max(row["memory_peak_bytes"] for row in kept) - state,
        "steps": len(kept),
        "losses": [row["loss"] for row in rows],
    }


def run_command(
    directory: Path, timeout_s: float, env: Mapping[str, str] | None = None, follow: Callable[[], bool] = lambda: False
) -> int | None:
    """Run `xtoken run` on `run.toml` of a directory, whose output is `out` there; its words go to `xtoken-run.log`.

    Args:
        directory: Directory of the run.
        timeout_s: It is ended after so long.
        env: Variables that its processes have beyond this one's.
        follow: Called several times a second; returns whether its steps are done.

    Returns:
        Its exit status; None: it was out of time and is killed.
    """
    command = [sys.executable, "-m", "xtoken_services.cli", "run", str(directory / "run.toml")]
    with (directory / "xtoken-run.log").open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})})
    until, done = time.monotonic() + timeout_s, False
    try:
        while (code := process.poll()) is None and time.monotonic() < until:
            if follow() and not done:
                done, until = True, min(until, time.monotonic() + FINISH_S)
            time.sleep(POLL_S)
        return code
    finally:
        process.kill()  # its guard ends what it has started
        process.wait()


def _teacher_memory(logs: Path) -> dict[str, int]:
    """Return the memory of rank 0's teacher, over its weights, and of its ring; nothing where it had no GPU."""
    text = "".join(file.read_text(encoding="utf-8") for file in sorted(logs.glob("teacher-0-0.*.log")))
    found = TEACHER_MEMORY.findall(text)
    if not found:
        return {}
    peak, weights, ring = map(int, found[-1])
    return {"teacher_bytes_above_weights": peak - weights, "ring_bytes": ring}


def complete(spec: dict[str, Any], assets: Assets, output: Path) -> dict[str, Any]:
    """Return a RunSpec as plain values, with models, text and output."""
    teacher = {"model": str(assets.teacher), **spec.get("teacher", {})}
    if PAIR_KINDS.get(spec.get("loss", {}).get("mode", LossConfig().mode)) == "projection":
        teacher = {"projection": str(assets.projection), **teacher}
    return {
        "eval": "none",
        **spec,
        "output": str(output),
        "student": {"model": str(assets.student), **spec.get("student", {})},
        "teacher": teacher,
        "data": {"path": str(assets.text), "shuffle": False, **spec.get("data", {})},
    }


def tail(directory: Path) -> str:
    """Return the ends of the command's output and of its workers' logs, without the frames of a command-line parser."""
    logs = [directory / "xtoken-run.log", *sorted((directory / "out").rglob("*.log"))]
    kept = {
        log.name: [line for line in _text(log).splitlines() if not any(word in line for word in FRAMES)] for log in logs
    }
    return "\n".join(f"{name}:\n" + "\n".join(lines[-TAIL:]) for name, lines in kept.items())


def step_rows(output: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's `steps.jsonl`, which another process may be writing."""
    return [json.loads(line) for line in _text(output / "steps.jsonl").splitlines(keepends=True) if line.endswith("\n")]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
