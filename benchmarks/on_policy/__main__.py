"""Tokens per second of on-policy distillation on one GPU, beside TRL's GOLD trainer, in one run.

    python -m benchmarks.on_policy --student DIR --teacher DIR --text FILE

Both sides complete the same prompts with the same models and lengths, sample from the whole distribution, generate with
transformers, and train on every completion once. Each has batches of several sizes, one of which is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.mps import serves_this_process
from benchmarks.gpu_tests import machine
from benchmarks.harness import command_line, write_result
from benchmarks.on_policy import MODULE

PROMPT_CHARACTERS = 250
RECORD_CHARACTERS = 400
PARTS = {"ours": 30.0, "trl": 30.0, "generation": 20.0}
"""What is measured, with the seconds that must be left for it to begin."""


def main() -> None:
    """Measure both sides and their parts; the file is written after each."""
    parser = command_line(__doc__, "on_policy")
    parser.add_argument("--student", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="a .jsonl file with `text`; prompts are beginnings")
    parser.add_argument("--equal", type=int, default=16, help="completions of a step, on both sides")
    parser.add_argument("--ours", type=int, nargs="*", default=[64, 256], help="other sizes of this package's steps")
    parser.add_argument("--trl", type=int, nargs="*", default=[64], help="other sizes of TRL's steps")
    parser.add_argument("--mode", default="chain", help="this package's loss")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="all if left out")
    parser.add_argument("--extended", action="store_true", help="TRL aligns by bytes: byte-level tokenizers alone")
    parser.add_argument("--steps", type=int, default=40, help="of this package's runs, the warm-up included")
    parser.add_argument("--trl-steps", type=int, default=4, help="of TRL's, beyond two of warm-up")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--context", type=int, default=384)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=600.0, help="nothing begins after so long")
    parser.add_argument("--weights", default="cuda_ipc", help="of this package's runs, as rollout.weights")
    parser.add_argument("--part-seconds", type=float, default=240.0, help="each run is ended after so long")
    parser.add_argument("--work", type=Path, default=Path("/tmp/xtoken-on-policy"))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    options.prompts = options.work / "prompts.jsonl"
    options.texts = write_prompts(options.text, options.prompts)
    options.records = len(options.texts)
    measure(options)


def write_prompts(text: Path, path: Path) -> list[str]:
    """Write the beginnings of documents as `prompt` and what follows as `completion`; return the prompts.

    Args:
        text: A `.jsonl` file with `text`.
        path: The file to write.
    """
    records = []
    for line in text.read_text(encoding="utf-8").splitlines():
        whole = json.loads(line)["text"][:RECORD_CHARACTERS]
        prompt = whole[:PROMPT_CHARACTERS].rsplit(" ", 1)[0]
        if len(whole) == RECORD_CHARACTERS and len(prompt) > PROMPT_CHARACTERS // 2:
            records.append({"prompt": prompt, "completion": whole[len(prompt) :]})
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return [record["prompt"] for record in records]


def measure(options: argparse.Namespace) -> None:
    """Measure everything that there is time for.

    Args:
        options: As `main` reads them.
    """
    began = time.monotonic()
    report: dict[str, Any] = {
        "machine": machine() if options.device == "cuda" else {},
        "mps": serves_this_process(),
        **{name: getattr(options, name) for name in ("mode", "extended", "new_tokens", "context", "dtype")},
        "student": options.student.name,
        "teacher": options.teacher.name,
        "prompts": options.records,
        "ours": [],
        "trl": [],
        "errors": [],
    }
    for part, rows in stages(options, lambda: options.seconds - (time.monotonic() - began)):
        if isinstance(rows, str):
            report["errors"].append(f"{part}: {rows}")
            print(f"{part}: {rows}", flush=True)
        else:
            report[part] = [*report.get(part, []), *rows]
            print(f"{part}: {json.dumps(rows)}", flush=True)
        write_result(options.out, report)


def stages(options: argparse.Namespace, left: Any) -> Iterator[tuple[str, list[dict[str, Any]] | str]]:
    """Yield each part's name with its figures, or the reason why it has none.

    Args:
        options: As `main` reads them.
        left: Returns the seconds that are left.
    """
    done = set()
    for part, size in planned(options):
        if (part, size) in done or left() < PARTS[part]:
            continue
        done.add((part, size))
        try:
            yield part, _stage(part, size, options, min(left(), options.part_seconds))
        except Exception as error:  # the other parts are measured all the same
            yield part, f"{size}: {error!r}"


def planned(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Return the parts in their order, those that the bounds are about first, each with its batch.

    Args:
        options: As `main` reads them.
    """
    first, *others = options.ours or [options.equal]
    second, *further = options.trl or [options.equal]
    plan = [("ours", first), ("trl", options.equal), ("ours", options.equal), ("trl", second)]
    plan += [*(("trl", size) for size in further), *(("ours", size) for size in others)]
    plan += [("generation", 0)]
    return [each for each in plan if each[0] in options.parts]


def _stage(part: str, size: int, options: argparse.Namespace, seconds: float) -> list[dict[str, Any]]:
    if part == "ours":
        from benchmarks.on_policy.ours import measure as run

        return [run(options, size, steps=options.steps, timeout_s=seconds, mode=options.mode)]
    if part == "trl":
        return [_trl(options, size, seconds)]
    import torch

    from benchmarks.on_policy import parts

    device = torch.device(options.device)
    return parts.generation(options, sorted({options.equal, *options.ours}), device)


def _trl(options: argparse.Namespace, batch: int, seconds: float) -> dict[str, Any]:
    """Run TRL's trainer in a process of its own.

    Raises:
        RuntimeError: It took no step behind its warm-up.
    """
    file, log = options.work / f"trl-{batch}.json", options.work / f"trl-{batch}.log"
    file.unlink(missing_ok=True)
    kept = {
        name: getattr(options, name) for name in ("student", "teacher", "prompts", "context", "new_tokens", "extended")
    }
    own = {"batch": batch, "steps": options.trl_steps, "seconds": max(seconds - 15, 10), "out": file}
    with log.open("w", encoding="utf-8") as out:
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        try:
            command = [sys.executable, "-m", MODULE, json.dumps({**kept, **own}, default=str)]
            subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=seconds, env=environment, check=False)
        except subprocess.TimeoutExpired:
            out.write("out of time\n")
    row: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if not row.get("steps"):
        raise RuntimeError("TRL took no step behind its warm-up:\n" + log.read_text()[-1500:])
    if row["steps"] < options.trl_steps:
        row["ended"] = why_ended(log.read_text(encoding="utf-8"))
    return row


def why_ended(log: str) -> str:
    """Return the last line of a log that names an exception; without one the time was over.

    Args:
        log: What a process printed.
    """
    named = re.findall(r"^[\w.]+(?:Error|Exception): .*", log, re.MULTILINE)
    return named[-1].strip() if named else "out of time"


if __name__ == "__main__":
    main()
