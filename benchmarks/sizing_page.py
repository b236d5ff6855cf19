"""Tables of `docs/sizing.md`: measured runs, estimates beside peaks, and a 7B from a 70B on paper."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

from xtoken_core.config.spec import RunSpec
from xtoken_services.common.run.machine import Machine
from xtoken_services.common.run.memory_estimate import CONTEXT_BYTES, checkpoint_bytes, shards
from xtoken_services.common.run.memory_fit import unresolved
from xtoken_services.common.run.memory_places import places_of

PAIRS = [
    ("qwen-de-500k", "ce"), ("qwen-de-500k", "chain"), ("qwen-de-500k-to-gemma", "chain"),
    ("qwen-de-500k-to-qwen", "kd_same"),
]  # fmt: skip
"""Conditions and methods of `experiments/real/results/strong.json`."""
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"
)  # fmt: skip
LLAMA_7B, LLAMA_70B = (
    {**dict(zip(SIZES, sizes, strict=True)), "tie_word_embeddings": False}
    for sizes in ((4096, 11008, 32, 32, 32, 32000), (8192, 28672, 80, 64, 8, 128256))
)
WITHIN, BELOW = 0.2, 0.05
"""Parts of a peak by which an estimate may differ from it at most, and be below it."""
LEAST = 1 << 22
"""Bytes of a peak below which it is not compared."""
TOKENS, CONTEXT = 8192, 4096
H100 = Machine(cores=128, gpu_bytes=80 * 10**9, gpus=8, memory_bytes=1 << 40, shared_bytes=1 << 39)


def weights_of(config: dict[str, Any]) -> int:
    """Return the number of weights of a Llama; biases and norms of queries are not counted."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    width = config.get("head_dim", hidden // heads)
    attention = 2 * hidden * width * (heads + config["num_key_value_heads"])
    layer = attention + 3 * hidden * inner + 2 * hidden
    tables = 1 if config.get("tie_word_embeddings", True) else 2
    return int(config["num_hidden_layers"] * layer + tables * config["vocab_size"] * hidden + hidden)


def write_sizes(directory: Path, config: dict[str, Any]) -> Path:
    """Write a model that has a configuration, and a file of weights without content, which takes no room."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    count = weights_of(config)
    header = json.dumps({"w": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + count)
    return directory


def paper() -> dict[str, Any]:
    """Return the estimate of a 7B from a 70B on one node of H100s, in bytes: the store's build, and the training."""
    with tempfile.TemporaryDirectory(prefix="xtoken-") as place:
        student, teacher = (
            {"model": write_sizes(Path(place) / name, config), "context_length": CONTEXT, "dtype": "bfloat16"}
            for name, config in (("7b", LLAMA_7B), ("70b", LLAMA_70B))
        )
        sent = {**teacher, "content": "topk", "topk": 64}
        whole = {
            "name": "7b", "output": "out", "data": {"path": "text.jsonl"}, "train": {"micro_batch_tokens": TOKENS},
            "student": {**student, "blockwise_head": True, "checkpoint_activations": True},
        }  # fmt: skip
        both = RunSpec.model_validate({**whole, "teacher": [{**sent, "gpu": 4, "gpus": 4}]})
        sharded = {"micro_batch_tokens": TOKENS, "parallel": "fsdp"}
        stored = {**whole, "teacher": [{**sent, "store": "store"}], "train": sharded, "workers": {"ranks": 8}}
        train = RunSpec.model_validate(stored)
        alone, sharing = (places_of(unresolved(spec, TOKENS), H100) for spec in (both, train))
        needed = [place.needed for place in sharing]
        return {
            "student": weights_of(LLAMA_7B),
            "teacher": weights_of(LLAMA_70B),
            "whole_student": alone[0].needed,
            "build": next(place.needed for place in alone if place.name == "cuda:4"),
            "train": needed[0],
            "host": needed[-2],
            "checkpoint": checkpoint_bytes(train) * shards(train),
            "context": CONTEXT_BYTES,
            "gpu": H100.gpu_bytes,
            "tokens": TOKENS,
        }


def measured(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each of `PAIRS`: the run of a pair that has taken the most memory."""
    rows = []
    for name, method in PAIRS:
        runs = [run for run in result["runs"] if (run["condition"], run["method"]) == (name, method)]
        largest = max(runs, key=lambda run: run["metrics"]["memory_peak_bytes"])
        condition = result["conditions"][name]
        sides = {side: condition[side] for side in ("student", "teacher")}
        rows.append({**sides, "method": method, "tokens": largest["micro_batch_tokens"], **largest["metrics"]})
    return rows


def sums(row: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return estimate and peak in bytes: of processes and shared memory, of shared memory alone, of GPUs, where used.

    Processes without a peak are not compared: some have ended before the steps, such as builders of a store.
    """
    estimated, peak = row["estimate"], row["peak"]
    known = [name for name in estimated["host"] if name in peak["host"]]
    ours, theirs = (sum(part["host"][name] for name in known) + part["shared"] for part in (estimated, peak))
    both = {"host": (ours, theirs)} | {name: (estimated[name], peak[name]) for name in ("shared", "gpu")}
    return {name: pair for name, pair in both.items() if pair[1] > LEAST}


def is_right(row: dict[str, Any]) -> bool:
    """Return whether a row's estimates are within the bounds; slots that a run never uses take nothing."""
    ratios = {name: ours / theirs for name, (ours, theirs) in sums(row).items()}
    return min(ratios.values()) >= 1 - BELOW and all(ratios.get(name, 1) <= 1 + WITHIN for name in ("host", "gpu"))


def by_machine(result: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of `results/sizing.json` with the sums of their parts by hardware, and the cases with `mapped`.

    Those are peaks of processes that were taken with the pages of a checkpoint that they map.
    """
    machines: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        name = " and ".join(row["machine"]["gpus"]) or f"{row['machine']['cores']} cores"
        machines.setdefault(name, []).append({"shared": None, "gpu": None, **row, **sums(row)})
    return {"machines": machines, "mapped": [row["case"] for row in result["rows"] if "mapped" in row["peak"]]}
