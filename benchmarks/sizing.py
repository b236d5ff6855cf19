"""The estimate of a run's memory beside the peaks of its processes, on a CPU or on GPUs.

    python -m benchmarks.sizing WORK [--only NAME ...] [--device cuda] [--student DIR --teacher DIR] [--out FILE]

makes two tokenizers and models with random weights in WORK, unless real ones are named, and runs every case of `CASES`
for a few steps by `xtoken run --json`, whose statuses name the processes. Of each process `/proc` is read every 20 ms:
its peak is the largest sum of anonymous and file pages. On GPUs those of a checkpoint that is being read, which the
kernel drops where memory is short, are left out: file pages do not count while one is mapped. Shared memory is the
trainer's: `/dev/shm`, and on GPUs the page-locked copy for checkpoints. A GPU's peak is what its driver counts as used
beyond the start. Rows are added to what FILE has of other devices and models.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import tomli_w
import torch
import transformers

from benchmarks.harness import command_line, gpu_bytes_used, machine, write_result
from benchmarks.other_tree import ROOT, environment
from benchmarks.sizing_page import BELOW, WITHIN, is_right, sums
from xtoken_core.config.resolved import ResolvedRun, parse_resolved_run
from xtoken_services.common.run.machine import Machine
from xtoken_services.common.run.memory_estimate import SHARED, STAGED, Where
from xtoken_services.common.run.memory_places import places_of
from xtoken_services.common.run.resume import RESOLVED

POLL_S = 0.02
STEPS = 2
CONTEXT = 256
FIELDS = ("RssAnon", "RssFile", "RssShmem")
MODELS = {"student": (192, 4, 4096), "teacher": (256, 6, 6144)}
"""Hidden units, layers and tokens of the made models."""
HIDDEN = {"student": {"blockwise_head": True}, "teacher": {"content": "hidden"}}
CASES: dict[str, dict[str, Any]] = {
    "logits": {},
    "p_kl": {"loss": {"mode": "p_kl"}},
    "hidden": HIDDEN,
    "hidden_checkpointed": {**HIDDEN, "student": {"blockwise_head": True, "checkpoint_activations": True}},
    "topk": {"teacher": {"content": "topk", "topk": 64}},
    "small_batch": {"train": {"micro_batch_tokens": 512}},
    "cross_entropy": {"teacher": None},
    "stored": {"teacher": {"content": "topk", "topk": 64, "store": "store", "store_missing": "compute"}},
    "rollouts": {
        "student": {"context_length": 320},
        "loss": {"mode": "chain"},
        "rollout": {"max_new_tokens": 48, "fraction": 0.5},
        "train": {"samples_per_step": 32, "micro_batch_tokens": 1024},  # several, so that slots are used
    },
}


def make_inputs(work: Path) -> None:
    """Write tokenizers, models and text, unless they are there."""
    from xtoken_services.demo.vocabularies import train_student_tokenizer, train_teacher_tokenizer

    if (work / "text.jsonl").exists():
        return
    work.mkdir(parents=True, exist_ok=True)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_text(encoding="utf-8", errors="replace")[:1500] for file in files]
    train = {"student": train_student_tokenizer, "teacher": train_teacher_tokenizer}
    for name, (hidden, layers, vocabulary) in MODELS.items():
        train[name](texts, work / name, vocabulary=vocabulary)
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=len(transformers.AutoTokenizer.from_pretrained(work / name)),
            hidden_size=hidden, intermediate_size=hidden * 8 // 3, num_hidden_layers=layers,
            num_attention_heads=hidden // 64, max_position_embeddings=2048,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(work / name)
    lines = [json.dumps({"text": text}) for text in texts]
    (work / "text.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def document(case: str, work: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the run file of a case."""
    tables: dict[str, Any] = {
        "name": f"sizing-{case}",
        "output": str(work / "runs" / case),
        "student": {"model": str(arguments.student or work / "student"), "context_length": CONTEXT},
        "teacher": {"model": str(arguments.teacher or work / "teacher"), "context_length": CONTEXT},
        "data": {"path": str(work / "text.jsonl")},
        "train": {"max_steps": STEPS, "samples_per_step": 16, "micro_batch_tokens": arguments.tokens},
        "eval": {"every": STEPS, "max_bytes": 1 << 14},
        "workers": {"device": arguments.device, "collators": 1},
    }
    for name, change in CASES[case].items():
        tables[name] = None if change is None else {**tables.get(name, {}), **change}
    return {name: table for name, table in tables.items() if table is not None}


class Peaks:
    """The largest memory of each process of a run so far."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self.names: dict[int, str] = {}
        self.host: dict[str, int] = {}
        self.shared = self.gpu = 0
        self._gpu_before = gpu_bytes_used()

    def read(self, supervisor: psutil.Process) -> None:
        """Read the memory of the processes that are known by name."""
        for pid, name in list(self.names.items()):
            try:
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                reads = self.on_gpu and ".safetensors" in Path(f"/proc/{pid}/maps").read_text()
            except OSError:
                continue
            of = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith(FIELDS)}
            if len(of) == len(FIELDS):
                self.host[name] = max(self.host.get(name, 0), of["RssAnon"] + (0 if reads else of["RssFile"]))
                if name.startswith("trainer"):
                    self.shared = max(self.shared, of["RssShmem"])
        self.gpu = max(self.gpu, gpu_bytes_used() - self._gpu_before)


def measure(run_file: Path, output: Path, log: Path, device: str) -> dict[str, Any]:
    """Run to the end, and return the peaks of its processes in bytes, and its speed.

    Raises:
        RuntimeError: It did not complete.
    """
    peaks = Peaks(device)
    command = [sys.executable, "-P", "-m", "xtoken_services.cli", "run", str(run_file), "--json"]
    with log.open("wb") as out:
        process = psutil.Popen(command, env=environment(ROOT), cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        peaks.names[process.pid] = "supervisor"
        with log.open("rb") as lines:
            while process.poll() is None:
                for line in lines:
                    if line.startswith(b"{") and line.endswith(b"\n"):
                        workers = json.loads(line).get("workers", ())
                        peaks.names |= {each["pid"]: each["name"] for each in workers if each["pid"]}
                peaks.read(process)
                time.sleep(POLL_S)
    if process.returncode:
        raise RuntimeError(f"{run_file} failed: see {log}")
    steps = [json.loads(line) for line in (output / "steps.jsonl").read_text().splitlines()]
    return {
        "host": peaks.host,
        "shared": peaks.shared,
        "gpu": peaks.gpu,
        "memory_peak_bytes": max(step["memory_peak_bytes"] for step in steps),
        "tokens_per_second": sorted(step["tokens_per_second"] for step in steps)[len(steps) // 2],
    }


def estimate(run: ResolvedRun, machine: Machine) -> dict[str, Any]:
    """Return the estimate of a run on a machine, in the terms of `measure`."""
    host: dict[str, int] = {}
    shared = gpu = 0
    places = places_of(run, machine)
    on_gpu = any(place.name.startswith("cuda") for place in places)
    for place in places:
        if place.name == SHARED:
            shared += place.needed
        elif place.name.startswith("cuda"):
            gpu = max(gpu, place.needed)
        else:
            for use in place.uses:
                if on_gpu and use.what == STAGED:
                    shared += use.nbytes
                elif use.where != Where.SHARED:
                    host[use.process] = host.get(use.process, 0) + use.nbytes
    return {"host": host, "shared": shared, "gpu": gpu}


def enter(out: Path, row: dict[str, Any]) -> None:
    """Put a row into a result file, in place of one of the same case, device and models."""
    of = ("case", "device", "student", "teacher", "tokens")
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []
    others = [each for each in rows if any(each[name] != row[name] for name in of)]
    write_result(out, {"within": WITHIN, "below": BELOW, "rows": [*others, row]})


def main() -> int:
    """Measure, write the result, and return 1 if an estimate is out of bounds."""
    parser = command_line(__doc__, "sizing")
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int, default=2048, help="train.micro_batch_tokens")
    parser.add_argument("--student", type=Path)
    parser.add_argument("--teacher", type=Path)
    arguments = parser.parse_args()
    work, wrong = arguments.work.resolve(), 0
    make_inputs(work)
    for case in arguments.only:
        made = document(case, work, arguments)
        run_file, output = work / f"{case}.toml", Path(made["output"])
        run_file.write_text(tomli_w.dumps(made), encoding="utf-8")
        for old in (output, work / "store"):
            shutil.rmtree(old, ignore_errors=True)
        row = {
            "case": case,
            "device": arguments.device,
            **{side: Path(made[side]["model"]).name if side in made else None for side in ("student", "teacher")},
            "tokens": made["train"]["micro_batch_tokens"],
            "machine": machine() if arguments.device == "cuda" else {**machine(), "gpus": []},
        }
        row["peak"] = measure(run_file, output, work / f"{case}.log", arguments.device)
        run = parse_resolved_run((output / RESOLVED).read_bytes(), source=str(output))
        row["estimate"] = estimate(run, Machine.of_this())
        enter(arguments.out, row)
        wrong += not is_right(row)
        ratios = {name: round(ours / theirs, 3) for name, (ours, theirs) in sums(row).items()}
        print(case, ratios, "" if is_right(row) else "out of bounds", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
