"""A teacher by its largest logits, and stored, on the real models: `python -m experiments.stored_teacher STAGE`.

    prepare   the training text, the tables of the two tokenizers, and for P-KL the projection
    quality   students of whole logits and of the 16, 64 and 256 largest, side by side
    second    time and GPU memory of a run with the living teacher, of builds of its stores, and of runs from these
    producer  time and memory of the teacher's micro-batch, by what is sent of it
    collect   write the result file, print a table; with `--merge`, rows that are not in the state stay as they were

Models and texts are those of `experiments.real`, whose stages `models` and `texts` make them in the state's directory.
A stage leaves out what is done; `--seconds` stops its runs gracefully. The runs of `second` are made one after the
other, and nothing else should use the GPU (CUDA_VISIBLE_DEVICES) meanwhile; nor while `producer` measures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w

from experiments.digits.stages import machine
from experiments.jobs import Job, finished, run_all
from experiments.real.methods import CONDITIONS, MICRO_BATCH_TOKENS, TEACHER_CONTEXT, Cell, job
from experiments.real.stages import _build_projection, write_sample
from experiments.stored_teacher.gpu_memory import GpuMemory
from experiments.stored_teacher.merging import merged
from xtoken_core.atomic import atomic_write

CONDITION, RATE = "de-500k", 2e-4
SIZES = (16, 64, 256)
OUTPUTS = ("whole", *map(str, SIZES))
METHODS = ("chain", "p_kl")
EVALUATIONS = 3
SECOND_EVALUATIONS = 1
"""Evaluations of a run of `second` after the one before its first step: it is about time and memory."""
RESULT = Path(__file__).with_name("results") / "stored_teacher.json"
STORED: dict[str, dict[str, Any]] = {"topk": {"content": "topk", "topk": 64}, "hidden": {"content": "hidden"}}
LIVING: dict[str, dict[str, Any]] = {"logits": {}} | STORED
MEMORY = re.compile(r"memory at most (\d+) bytes, (\d+) of them weights; ring (\d+) bytes")
PRODUCER = "stored-producer.json"
STEP_SECONDS = ("seconds", "loss_seconds", "backward_seconds")
"""Measures of `steps.jsonl` that are kept of every step: a run that was ended early is compared with its like."""
FIRST_STEPS = 5
"""Steps that are left out of medians: kernels are compiled in them."""
LEAST_S = 30.0
"""Seconds that a run of `second` needs at least: none is begun with less."""


def main() -> int:
    """Run a stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["prepare", "quality", "second", "producer", "collect"])
    parser.add_argument("--state", type=Path, default=Path("runs/real"), help="models, texts and runs")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--samples", type=int, default=12, help="documents of a step of `quality`")
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--side-by-side", type=int, default=8, help="runs of `quality` at a time")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS), help="losses of `quality`")
    parser.add_argument("--outputs", nargs="*", choices=OUTPUTS, default=list(OUTPUTS), help="teacher's, of `quality`")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--merge", action="store_true", help="`collect` keeps what the result file has besides")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    state: Path = arguments.state.absolute()
    if arguments.stage == "prepare":
        prepare(state, arguments.methods)
    elif arguments.stage == "quality":
        made = quality_jobs(arguments.methods, arguments.steps, arguments.device, arguments.samples)
        jobs = [job for job in made if job.name.rpartition("-")[2] in arguments.outputs]
        run_all(state, jobs, side_by_side=arguments.side_by_side, until=until)
    elif arguments.stage == "second":
        second(state, arguments.steps, arguments.device, until)
    elif arguments.stage == "producer":
        producer(state, arguments.device)
    else:
        collect(state, arguments.out, merge=arguments.merge)
    return 0


def prepare(state: Path, methods: list[str]) -> None:
    """Write the training text, and what the losses read about the two tokenizers."""
    condition = CONDITIONS[CONDITION]
    write_sample(state / "texts", Cell(CONDITION, "chain", "even", RATE, 0))
    sides = {side: str(state / "models" / getattr(condition, side)) for side in ("student", "teacher")}
    command = [sys.executable, "-m", "xtoken_services.cli", "chain", "inspect", "x", "--json"]
    for side, directory in sides.items():
        command += [f"--{side}", directory]
    subprocess.run(command, capture_output=True, check=True)
    if "p_kl" in methods:
        _build_projection(state, condition)


def run_file(
    method: str,
    name: str,
    teacher: dict[str, Any],
    steps: int,
    device: str,
    samples: int | None = None,
    evaluations: int = EVALUATIONS,
) -> Job:
    """Return a run of the experiment on real models with other settings of its teacher.

    Args:
        method: Its loss.
        name: Its name.
        teacher: Settings of the teacher beside the experiment's.
        steps: Optimiser steps.
        device: `workers.device`.
        samples: Documents of a step; None: the experiment's.
        evaluations: Evaluations after the one before the first step.
    """
    document = tomllib.loads(job(Cell(CONDITION, method, "even", RATE, 0), device=device, steps=steps).file)
    document["name"], document["output"] = name, f"runs/{name}"
    document["teacher"][0] |= teacher
    also = [f"texts/{CONDITIONS[CONDITION].source}.test.jsonl"]
    document["eval"] |= {"every": max(1, steps // evaluations), "also": also}
    if samples is not None:
        document["train"]["samples_per_step"] = samples
    return Job(name, tomli_w.dumps(document))


def quality_jobs(methods: list[str], steps: int, device: str, samples: int) -> list[Job]:
    """Return the runs with whole logits and with the largest of each position."""
    jobs = []
    for method in methods:
        jobs.append(run_file(method, f"stored-{method.replace('_', '-')}-whole", {}, steps, device, samples))
        for k in SIZES:
            teacher = {"content": "topk", "topk": k}
            jobs.append(run_file(method, f"stored-{method.replace('_', '-')}-{k}", teacher, steps, device, samples))
    return jobs


def second(state: Path, steps: int, device: str, until: float) -> None:
    """Make, each alone, the run with the living teacher's logits, and for each content a store and the runs with it.

    These are the run from the store, and, when all stores have been read, that with a living teacher which sends what
    the store holds.
    """
    _measured(state, "living", "logits", LIVING["logits"], steps, device, until)
    for content, settings in STORED.items():
        store = state / "stores" / content
        file = state / f"stored-build-{content}.toml"
        file.write_text(run_file("chain", file.stem, settings, steps, device).file, encoding="utf-8")
        if build(file, store, until):
            _measured(state, "again", content, settings | {"store": str(store)}, steps, device, until)
    for content, settings in STORED.items():
        _measured(state, "living", content, settings, steps, device, until)


def _measured(
    state: Path, kind: str, content: str, teacher: dict[str, Any], steps: int, device: str, until: float
) -> None:
    """Make a run of `second`, and keep its time, the GPU's memory, and the kernels that were compiled for it."""
    job = run_file("chain", f"stored-{kind}-{content}", teacher, steps, device, evaluations=SECOND_EVALUATIONS)
    if finished(state, job.name):
        return
    began, compiled = time.monotonic(), compiled_kernels()
    with GpuMemory() as memory:
        if not run_all(state, [job], side_by_side=1, until=until, least_s=LEAST_S):
            return
    seen = {"run_seconds": round(time.monotonic() - began, 1)} | memory.summary()
    seen["kernels_compiled"] = compiled_kernels() - compiled
    atomic_write(state / f"{job.name}.measured.json", json.dumps(seen))


def compiled_kernels() -> int:
    """Return the number of kernels in Triton's cache on disk."""
    home = Path(os.environ.get("TRITON_HOME", Path.home()))
    return sum(1 for _ in Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache")).glob("*/*.cubin"))


def build(file: Path, store: Path, until: float) -> bool:
    """Build a store unless it has been; return True if there is one.

    Args:
        file: The run file, beside which `NAME.json` describes the build.
        store: Directory of the store.
        until: Time on the monotonic clock at which a build is ended.
    """
    built = file.with_suffix(".json")
    if built.is_file():
        return True
    began = time.monotonic()
    if until - began < LEAST_S:
        return False
    command = [sys.executable, "-m", "xtoken_services.cli", "store", "build", str(file), "--out", str(store), "--json"]
    with GpuMemory() as memory:
        try:
            made = subprocess.run(command, capture_output=True, text=True, timeout=until - began, check=False)
        except subprocess.TimeoutExpired:  # what it has written stays: the next call resumes it
            print(f"{store.name}: ended after {until - began:.0f} s", flush=True)
            return False
    if made.returncode:
        print(made.stdout[-2000:], made.stderr[-2000:], flush=True)
        return False
    summary = json.loads(made.stdout.strip().splitlines()[-1])
    lines = _lines(store / "build" / "steps.jsonl")
    own = {
        "seconds": round(time.monotonic() - began, 1),
        "steps": len(lines),
        "write_tokens_per_second": sum(line["tokens"] for line in lines) / sum(line["seconds"] for line in lines),
        "write_bytes_per_second": sum(line["store_bytes"] for line in lines) / sum(line["seconds"] for line in lines),
        "median_tokens_per_second": median(line["tokens_per_second"] for line in lines),
    }
    atomic_write(built, json.dumps(summary | own | {"store": store.name} | memory.summary(), indent=1))
    print(f"{store.name}: {summary['bytes']} bytes after {own['seconds']} s", flush=True)
    return True


def producer(state: Path, device: str) -> None:
    """Measure the teacher's micro-batches, and keep the result."""
    import torch

    from experiments.stored_teacher.producer import measure

    condition = CONDITIONS[CONDITION]
    where = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    directory = state / "models" / condition.teacher
    text = state / "texts" / f"{condition.source}.validation.jsonl"
    made = measure(directory, text, where, sizes=SIZES, tokens=MICRO_BATCH_TOKENS, length=TEACHER_CONTEXT)
    for name, form in made["forms"].items():
        print(f"{name:20} {1e3 * form['seconds']:.2f} ms", flush=True)
    atomic_write(state / PRODUCER, json.dumps(made | {"device": where.type, "machine": machine()}, indent=1))


def collect(state: Path, out: Path, *, merge: bool = False) -> None:
    """Write the result file of the finished runs, and of others up to their last evaluation.

    Args:
        state: Directory of the runs.
        out: The result file.
        merge: Keep the rows that it has and the state has not, or not as far.

    Raises:
        OtherTextError: They begin at other bits per byte: they are of other texts or models.
    """
    names = sorted(path.name for path in (state / "runs").glob("stored-*"))
    builds = sorted(state.glob("stored-build-*.json"))
    result: dict[str, Any] = {
        "machine": machine(),
        "condition": CONDITION,
        "learning_rate": RATE,
        "runs": {name: record(state, name) for name in names if finished(state, name) or _far(state, name)},
        "not_finished": [name for name in names if not finished(state, name)],
        "builds": {file.stem.rpartition("-")[2]: json.loads(file.read_text()) for file in builds},
    }
    if (state / PRODUCER).is_file():
        result["producer"] = json.loads((state / PRODUCER).read_text(encoding="utf-8"))
    if merge and out.is_file():
        result = merged(json.loads(out.read_text(encoding="utf-8")), result)
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, json.dumps(result, indent=1) + "\n")
    for name, run in result["runs"].items():
        print(f"{name:28} " + " ".join(f"{key}={value}" for key, value in run.items() if key != "curve"))


def record(state: Path, name: str) -> dict[str, Any]:
    """Return a run's results: quality, time, memory, and waiting for a store."""
    directory = state / "runs" / name
    steps, evals = _lines(directory / "steps.jsonl"), _lines(directory / "eval.jsonl")
    later = steps[FIRST_STEPS:] or steps
    curve = [{key: row[key] for key in row if key == "step" or key.startswith("bits_per_byte")} for row in evals]
    made = {
        "steps": len(steps),
        "samples_per_step": len(steps[0]["ids"]),
        "ids_sha256": hashlib.sha256(json.dumps([line["ids"] for line in steps]).encode()).hexdigest(),
        "losses": [round(line["loss"], 6) for line in steps],
        "loss": round(median(line["loss"] for line in steps[-10:]), 5),
        "seconds_per_step": round(median(line["seconds"] for line in later), 5),
        "tokens_per_second": median(line["tokens_per_second"] for line in later),
        "teacher_wait": round(median(line["teacher_wait"] for line in later), 6),
        "trainer_peak_bytes": max((line.get("memory_peak_bytes") or 0 for line in steps), default=0),
        "curve": curve,
    }
    for measure in STEP_SECONDS:
        if all(line.get(measure) is not None for line in steps):
            made[f"step_{measure}"] = [round(line[measure], 4) for line in steps]
    if "store_wait_seconds" in steps[-1]:
        waited, total = (sum(line[key] for line in later) for key in ("store_wait_seconds", "seconds"))
        made |= {
            "store_wait_fraction": round(waited / total, 5),
            "store_wait_fraction_whole_run": round(
                sum(line["store_wait_seconds"] for line in steps) / sum(line["seconds"] for line in steps), 5
            ),
            "store_bytes_per_step": median(line["store_bytes"] for line in later),
        }
    logs = "".join(path.read_text(errors="replace") for path in sorted((directory / "logs").glob("teacher-0-0*.log")))
    if matches := MEMORY.findall(logs):
        peak, weights, ring = map(int, matches[-1])
        made |= {"teacher_peak_bytes": peak, "teacher_weight_bytes": weights, "teacher_ring_bytes": ring}
    measured = state / f"{name}.measured.json"
    return made | (json.loads(measured.read_text()) if measured.is_file() else {})


def _far(state: Path, name: str) -> bool:
    """Return True if a run has been evaluated after its first step, or, of `second`, has steps to be timed."""
    directory = state / "runs" / name
    if any(row["step"] for row in _lines(directory / "eval.jsonl")):
        return True
    return (
        name.startswith(("stored-again", "stored-living")) and len(_lines(directory / "steps.jsonl")) > 2 * FIRST_STEPS
    )


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


if __name__ == "__main__":
    sys.exit(main())
