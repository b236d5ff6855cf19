"""Train on Python sources with and without a mask on white space: `python -m experiments.white_space --out FILE`.

Needs the models and texts of `experiments.real` in `--state`. Every variant starts from the same student and sees the
same documents. Each student's cross-entropy on held-out sources is measured apart for line ends, spaces and the rest.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.digits.stages import machine
from experiments.jobs import Job, finished, run_all
from experiments.real.methods import GEMMA3, SMOLLM2
from xtoken_core.atomic import atomic_write

RESULT = Path(__file__).with_name("results") / "white-space.json"
CONTEXT = 512
CLASSES = ("line ends", "spaces", "other")


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        kl: Weight of the divergence.
        ce: Weight of the cross-entropy.
        custom: Loss of the mode `custom`; empty: chain, or none without a weight.
    """

    kl: float
    ce: float
    custom: str = ""


_MASKED = "experiments.losses.masked_chain:ChainWithout"
VARIANTS = {
    "cross-entropy": Variant(0.0, 1.0),
    "chain": Variant(1.0, 0.1),
    "chain-no-line-ends": Variant(1.0, 0.1, _MASKED + "LineEnds"),
    "chain-no-white-space": Variant(1.0, 0.1, _MASKED + "WhiteSpace"),
}


def job(name: str, steps: int, seed: int, device: str) -> Job:
    """Return the run of a variant.

    Args:
        name: Of `VARIANTS`.
        steps: Optimiser steps.
        seed: Of the order of documents.
        device: `workers.device`.
    """
    variant = VARIANTS[name]
    dtype = "float32" if device == "cpu" else "bfloat16"
    loss: dict[str, Any] = {"kl_loss_weight": variant.kl, "ce_loss_scale": variant.ce}
    if variant.kl:
        loss["kl_loss_weight_end"] = "none"  # as these runs were made
    tables: dict[str, dict[str, Any]] = {
        "student": {"model": f"models/{SMOLLM2}", "context_length": CONTEXT, "dtype": dtype},
        "data": {"path": "texts/python-code.train.jsonl", "epochs": 100},
        "eval": {"path": "texts/python-code.validation.jsonl", "every": max(1, steps // 4), "max_bytes": 60_000},
        "train": {
            "samples_per_step": 16,
            "max_steps": steps,
            "micro_batch_tokens": CONTEXT if device == "cpu" else 8 * CONTEXT,
            "learning_rate": 1e-4,
            "min_learning_rate": 1e-5,
            "warmup_steps": max(1, steps // 20),
            "checkpoint_every": steps,
            "keep_checkpoints": 1,
        },
        "workers": {"collators": 1, "device": device},
    }
    if variant.kl:
        tables["[teacher]"] = {"model": f"models/{GEMMA3}", "context_length": CONTEXT, "dtype": dtype}
        loss["mode"] = "custom" if variant.custom else "chain"
    tables["loss"] = loss
    run = _run_name(name, seed)
    lines = [f'name = "{run}"', f'output = "runs/{run}"', f"seed = {seed}"]
    for table, values in tables.items():
        lines += ["", f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return Job(run, "\n".join(lines) + "\n", ("--loss", variant.custom) if variant.custom else ())


def _run_name(name: str, seed: int) -> str:
    return f"white-space-{name}-s{seed}"


def by_class(model_dir: Path, documents: list[str], device: str) -> dict[str, Any]:
    """Measure a student on the beginnings of documents: bits per byte, and by class nats, hits and tokens.

    Args:
        model_dir: A Hugging Face directory.
        documents: Their text.
        device: Of the forward pass.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).to(device).eval()
    texts = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    kinds = torch.tensor([2 if not text.isspace() else 0 if "\n" in text else 1 for text in texts])
    totals = torch.zeros(3, 3, dtype=torch.float64)  # class; nats, hits, tokens
    size = 0
    for text in documents:
        ids = tokenizer.encode(text, add_special_tokens=False)[: CONTEXT - 1]
        size += len(tokenizer.decode(ids).encode())
        row = torch.tensor([[tokenizer.bos_token_id, *ids]], device=device)
        with torch.no_grad():
            log_q = torch.log_softmax(model(row).logits[0, :-1].float(), dim=-1)  # [T, V]
        target = row[0, 1:]
        nats = -log_q.gather(1, target.unsqueeze(1)).squeeze(1)
        scores = torch.stack([nats, (log_q.argmax(1) == target).float(), torch.ones_like(nats)], 1).cpu().double()
        totals.index_add_(0, kinds[target.cpu()], scores)
    return {
        "bits_per_byte": float(totals[:, 0].sum()) / math.log(2) / size,
        "classes": {
            name: {"nats": float(nats / count), "accuracy": float(hits / count), "tokens": int(count)}
            for name, (nats, hits, count) in zip(CLASSES, totals, strict=True)
            if count
        },
    }


def _records(state: Path, seeds: list[int], documents: list[str], device: str) -> Iterator[dict[str, Any]]:
    """Yield the student before training, then every run; one that was stopped has its evaluations alone."""
    yield {"variant": "before training", **by_class(state / "models" / SMOLLM2, documents, device)}
    for seed in seeds:
        for name in VARIANTS:
            directory = state / "runs" / _run_name(name, seed)
            if not (directory / "eval.jsonl").is_file():
                continue
            rows = [json.loads(line) for line in (directory / "eval.jsonl").read_text(encoding="utf-8").splitlines()]
            record = {"variant": name, "seed": seed, "curve": {row["step"]: row["bits_per_byte"] for row in rows}}
            if finished(state, directory.name):
                record |= by_class(directory / "model", documents, device)
            yield record


def main() -> None:
    """Make the runs that are not finished, then measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path("runs/real"), help="models, texts and runs")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--documents", type=int, default=60, help="held-out documents that are measured by class")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--side-by-side", type=int, default=4, help="runs at a time")
    parser.add_argument("--seconds", type=float, default=500.0, help="time after which runs are stopped")
    arguments = parser.parse_args()
    state, until = arguments.state, time.monotonic() + arguments.seconds
    jobs = [job(name, arguments.steps, seed, arguments.device) for seed in arguments.seeds for name in VARIANTS]
    run_all(state, jobs, side_by_side=arguments.side_by_side, until=until)
    import torch

    device = "cuda" if arguments.device != "cpu" and torch.cuda.is_available() else "cpu"
    lines = (state / "texts" / "python-code.validation.jsonl").read_text(encoding="utf-8").splitlines()
    documents = [json.loads(line)["text"] for line in lines[: arguments.documents]]
    result = {"machine": machine(), "steps": arguments.steps, "documents": len(documents), "records": []}
    for record in _records(state, arguments.seeds, documents, device):
        print(json.dumps(record), flush=True)
        result["records"].append(record)
        atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
