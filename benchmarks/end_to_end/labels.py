"""Labels of the rows of a whole run's result files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
SUBJECTS = {
    "end_to_end": "one GPU",
    "end_to_end_chain": "chain",
    "end_to_end_lengths": "documents of different lengths",
    "end_to_end_small": "small models",
    "end_to_end_mps": "NVIDIA's MPS",
    "end_to_end_two_gpus": "two GPUs",
}
FILES = {name: subject for name, subject in SUBJECTS.items() if (RESULTS / f"{name}.json").exists()}
"""The result files that there are, each of one machine, and its subject."""
LOSSES = {"p_kl": "P-KL", "gold": "gold", "h_kl": "H-KL", "chain": "chain"}
STEP_PARTS = {
    "forward_seconds": "forward",
    "loss_seconds": "loss",
    "backward_seconds": "backward",
    "optimizer_seconds": "optimiser",
}
"""Fields of a trainer's step record, and how they are called."""


def loss_of(serial: str) -> str:
    """Return the loss of a serial loop by the loop's key, such as `gold public`."""
    loss, _, kind = serial.partition(" ")
    return LOSSES[loss] + (" by TRL's GOLD loss" if kind == "public" else "")


def activations_of(serial: str) -> str:
    """Return whether a serial loop's activations are kept or recomputed."""
    return "recomputed" if serial.endswith(" checkpointed") else "kept"


def label_of(variant: dict[str, Any]) -> str:
    """Return the loss of a variant and its settings."""
    changes = variant["changes"]
    student, teacher, workers, train = (changes.get(part, {}) for part in ("student", "teacher", "workers", "train"))
    parts = {
        ", not compiled": not student.get("compile"),
        ", hidden states": "hidden" in workers.get("signal", ""),
        ", teacher in 8 bits": teacher.get("fp8"),
        ", four samples together": variant["wide"],
        ", teacher on the other GPU": teacher.get("gpu") is not None,
        ", student shared by two GPUs": workers.get("ranks", 1) > 1,
        ", its gathered weights kept, gradients added up in bfloat16": not train.get("reshard_after_forward", True),
        ", MPS": variant.get("mps"),
        ", 135M student from 270M teacher": variant.get("pair") == "135m_270m",
        f", lengths of {variant.get('lengths')}": variant.get("lengths"),
        ", padded": train.get("packing") == "off",
    }
    return loss_of(variant["serial"]) + "".join(words for words, applies in parts.items() if applies)


def machines_of(result: dict[str, Any]) -> int:
    """Return how many machines of a kind a result file's calls were on."""
    return len({call.get("digest", result["machine"].get("digest")) for call in result["calls"]})


def bytes_above_state(variant: dict[str, Any]) -> int | None:
    """Return the bytes that a GPU's processes took beyond weights, gradients and moments; None if not measured."""
    parts = ("peak_bytes_above_state", "teacher_bytes_above_weights", "ring_bytes")
    return sum(variant[part] for part in parts) if all(part in variant for part in parts) else None


def options_of(call: dict[str, Any]) -> str:
    """Return the options of one call of the benchmark."""
    words = ["--variants", *call["variants"]] if call["variants"] else []
    words += [f"--{name.replace('_', '-')}" for name in ("public_loss", "no_serial") if call.get(name)]
    return f"`{' '.join(words)}`" if words else "serial loops only"


def step_parts(variant: dict[str, Any]) -> dict[str, float]:
    """Return the parts of a trainer's step in seconds, as far as they were recorded."""
    median = variant.get("median", {})
    return {words: median[name] for name, words in STEP_PARTS.items() if name in median}
