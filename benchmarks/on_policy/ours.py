"""This package's side: a run of real processes whose student trains on its own completions alone."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.end_to_end.pipeline import run_command, step_rows, tail

WARM_UP = 8
PARTS = ("forward_seconds", "loss_seconds", "backward_seconds", "optimizer_seconds")
WAITS = ("data_wait", "teacher_wait", "rollout_wait")
TEACHER_ROOM = 1.5
"""Tokens of the teacher's context per token of the student's."""


def run_file(options: Any, batch: int, output: Path, *, steps: int, mode: str) -> str:
    """Return the text of a run file.

    Args:
        options: Models, prompts and lengths, as `__main__` reads them.
        batch: Completions of a step, generated together.
        output: Directory of the run.
        steps: Optimiser steps.
        mode: The loss.
    """
    context = options.context
    return tomli_w.dumps(
        {
            "eval": "none",
            "output": str(output),
            "student": {"model": str(options.student), "context_length": context, "dtype": options.dtype},
            "teacher": {
                "model": str(options.teacher), "context_length": int(TEACHER_ROOM * context), "dtype": options.dtype,
            },
            "data": {"path": str(options.prompts), "epochs": 1 + steps * batch // options.records},
            "rollout": {"max_new_tokens": options.new_tokens, "weights": options.weights},
            "loss": {"mode": mode},
            "queue": {"block_size": batch},
            "train": {
                "samples_per_step": batch, "max_steps": steps, "checkpoint_every": 10 * steps, "learning_rate": 1e-5,
                "micro_batch_tokens": options.micro_batch_tokens,
            },
            "workers": {"device": options.device, "collators": 1},
        }
    )  # fmt: skip


def measure(options: Any, batch: int, *, steps: int, timeout_s: float, mode: str = "chain") -> dict[str, Any]:
    """Run, and return the figures of all steps behind the warm-up; of a run that is out of time those that it took.

    Args:
        options: As for `run_file`.
        batch: Likewise.
        steps: Likewise.
        timeout_s: The run is ended after so long.
        mode: The loss.

    Raises:
        RuntimeError: It took too few steps; the last lines of its logs are in the text.
    """
    directory = Path(options.work) / f"ours-{mode}-{batch}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    text = run_file(options, batch, directory / "out", steps=steps, mode=mode)
    (directory / "run.toml").write_text(text, encoding="utf-8")
    code = run_command(directory, timeout_s)
    rows = step_rows(directory / "out")
    for weights in ("checkpoints", "model"):
        shutil.rmtree(directory / "out" / weights, ignore_errors=True)
    if len(rows) < WARM_UP + 2:
        raise RuntimeError(f"xtoken run ended with {code} after {len(rows)} steps:\n{tail(directory)}")
    return {"batch": batch, "mode": mode, "weights": options.weights, **result(rows)}


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a run.

    Args:
        rows: Lines of `steps.jsonl`.
    """
    kept = rows[WARM_UP:]
    seconds = kept[-1]["time"] - rows[WARM_UP - 1]["time"]
    tokens = sum(row["completions"] * row["completion_tokens"] for row in kept)
    median = {name: statistics.median(row.get(name, 0.0) for row in kept) for name in (*PARTS, *WAITS, "seconds")}
    working = sum(row["seconds"] * (1 - row["data_wait"]) for row in kept)
    return {
        "steps": len(kept),
        "seconds_per_step": seconds / len(kept),
        "completion_tokens_per_step": tokens / len(kept),
        "tokens_per_second": tokens / seconds,
        "generated_tokens_per_second": statistics.median(row["generated_tokens_per_second"] for row in kept),
        "trained_tokens_per_second": tokens / working,
        "waits": {name: median[name] for name in WAITS},
        "seconds": {name: median[name] for name in (*PARTS, "seconds")},
        "finished": statistics.fmean(row["finished"] for row in kept),
        "staleness": statistics.fmean(row["staleness"] for row in kept),
        "peak_bytes": max(row["memory_peak_bytes"] for row in kept),
    }
