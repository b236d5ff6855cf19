"""The same training through xtoken's own processes: queue, collators, teacher, trainer, started by `xtoken run`."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from benchmarks.end_to_end.assets import Assets
from xtoken_core.config.loss import PROJECTING_MODES, LossConfig

TEACHER_MEMORY = re.compile(r"memory at most (\d+) bytes, (\d+) of them weights; ring (\d+) bytes")
"""What a teacher on a GPU logs when its ring closes."""


def pipeline(
    assets: Assets,
    spec: dict[str, Any],
    *,
    directory: Path,
    warmup: int,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a RunSpec to its end and read its own records.

    Args:
        assets: What it reads.
        spec: The run, as plain values, without models, text and output.
        directory: Its output, emptied first.
        warmup: Steps at the beginning that do not count.
        timeout_s: The whole run is ended after so long.
        env: Variables that its processes have beyond this one's.

    Returns:
        Unpadded student tokens per wall second after the warm-up; medians of every number in `steps.jsonl`; seconds
        from the command to the first step's end; and rank 0's peaks of memory in bytes: the trainer's above parameters,
        gradients and moments, which all are bfloat16, its teacher's above its weights, and the ring's.

    Raises:
        RuntimeError: The run failed; its last lines are in the text.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    file = directory / "run.toml"
    file.write_text(_toml(complete(spec, assets, directory / "out")), encoding="utf-8")
    began = time.time()
    log = directory / "xtoken-run.log"
    with log.open("w", encoding="utf-8") as out:
        command = [sys.executable, "-m", "services.cli", "run", str(file)]
        code = _run(command, out, timeout_s, {**os.environ, **(env or {})})
    rows = [json.loads(line) for line in _lines(directory / "out" / "steps.jsonl")]
    for weights in ("checkpoints", "model"):  # ten gigabytes, and no reader
        shutil.rmtree(directory / "out" / weights, ignore_errors=True)
    if code != 0 or len(rows) <= warmup:
        raise RuntimeError(f"xtoken run ended with {code} after {len(rows)} steps:\n" + _tail(directory))
    kept = rows[warmup:]
    numbers = {name for row in kept for name, value in row.items() if isinstance(value, float)}
    ranks = spec["workers"].get("ranks", 1)
    state = 4 * sum(file.stat().st_size for file in assets.student.glob("*.safetensors")) // ranks
    return {
        "tokens_per_second": sum(row["tokens"] for row in kept) / (kept[-1]["time"] - rows[warmup - 1]["time"]),
        "command_to_first_step_s": rows[0]["time"] - began,
        "median": {name: statistics.median(row[name] for row in kept if name in row) for name in sorted(numbers)},
        "peak_bytes_above_state": max(row["memory_peak_bytes"] for row in kept) - state,
        **_teacher_memory(directory / "out" / "logs"),
        "steps": len(kept),
        "losses": [row["loss"] for row in rows],
    }


def _run(command: list[str], out: IO[str], timeout_s: float, env: Mapping[str, str]) -> int:
    """The exit status; a run that is out of time is killed with all its workers."""
    process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=dict(env))
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
        process.kill()  # its guard ends what it has started
        process.wait()
        raise RuntimeError(f"xtoken run was not done after {timeout_s:g} s") from error


def _teacher_memory(logs: Path) -> dict[str, int]:
    """Of rank 0's teacher, over its weights, and of its ring; nothing where it had no GPU."""
    text = "".join(file.read_text(encoding="utf-8") for file in sorted(logs.glob("teacher-0-0.*.log")))
    found = TEACHER_MEMORY.findall(text)
    if not found:
        return {}
    peak, weights, ring = map(int, found[-1])
    return {"teacher_bytes_above_weights": peak - weights, "ring_bytes": ring}


def complete(spec: dict[str, Any], assets: Assets, output: Path) -> dict[str, Any]:
    """A RunSpec as plain values, with models, text and output."""
    teacher = {"model": str(assets.teacher), **spec.get("teacher", {})}
    if spec.get("loss", {}).get("mode", LossConfig().mode) in PROJECTING_MODES:
        teacher = {"projection": str(assets.projection), **teacher}
    return {
        "eval": "none",
        **spec,
        "output": str(output),
        "student": {"model": str(assets.student), **spec.get("student", {})},
        "teacher": teacher,
        "data": {"path": str(assets.text), "shuffle": False, **spec.get("data", {})},
    }


def _toml(spec: dict[str, Any]) -> str:
    """Tables one level deep, as a RunSpec of one teacher has them; JSON's scalars are TOML's."""
    plain = [f"{name} = {json.dumps(value)}" for name, value in spec.items() if not isinstance(value, dict)]
    for name, table in spec.items():
        if isinstance(table, dict):
            plain += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(plain) + "\n"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _tail(directory: Path) -> str:
    """The ends of the command's output and of its workers' logs."""
    logs = [directory / "xtoken-run.log", *sorted((directory / "out").rglob("*.log"))]
    return "\n".join(f"{path.name}:\n" + "\n".join(_lines(path)[-12:]) for path in logs)
