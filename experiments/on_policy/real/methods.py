"""The compared runs: the teacher's answers as targets, chain on them, and chain on the student's own completions."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.jobs import Job
from experiments.on_policy.methods import toml_of
from experiments.real.methods import GEMMA3, SMOLLM2

RATES = (5e-5, 2e-4)
SEEDS = (0, 1, 2)
STEPS, SAMPLES = 120, 32
MAX_NEW_TOKENS = 16
CONTEXT = 128


@dataclass(frozen=True)
class Method:
    """A way to train the student.

    Attributes:
        title: Its name in tables.
        fraction: Fraction of a step's samples that the student generates; the others have the teacher's answers.
        loss: The `[loss]` table.
    """

    title: str
    fraction: float = 0.0
    loss: dict[str, Any] = field(default_factory=lambda: {"mode": "chain", "kl_loss_weight": 1.0, "ce_loss_scale": 0.0})

    @property
    def taught(self) -> bool:
        """True if a teacher takes part in the run."""
        return self.loss["kl_loss_weight"] > 0


METHODS = {
    "supervised": Method("supervised on the teacher's answers", loss={"kl_loss_weight": 0.0, "ce_loss_scale": 1.0}),
    "off_policy": Method("chain, off-policy"),
    "on_policy": Method("chain, on-policy", 1.0),
    "mixture": Method("chain, half on-policy", 0.5),
}


@dataclass(frozen=True)
class Cell:
    """One run: a method at a learning rate and a seed of the data's order."""

    method: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """The run's name."""
        return f"verbs-{self.method.replace('_', '-')}-{self.rate:g}-s{self.seed}"


def job(cell: Cell, *, device: str = "auto", steps: int = STEPS) -> Job:
    """Return the run of a cell, whose models and texts lie in the state's directory.

    Args:
        cell: The cell.
        device: `workers.device` of the run.
        steps: Optimiser steps.
    """
    method = METHODS[cell.method]
    dtype = "float32" if device == "cpu" else "bfloat16"
    tables: dict[str, Any] = {
        "name": cell.name,
        "output": f"runs/{cell.name}",
        "seed": cell.seed,
        "student": {"model": f"models/{SMOLLM2}", "context_length": CONTEXT, "dtype": dtype},
        "data": {"path": f"verbs/{'prompts' if method.fraction == 1 else 'answers'}.jsonl", "append_eos": False},
        "eval": {"path": "verbs/text.jsonl", "every": max(1, steps // 3)},
        "eval.tasks": {
            "path": ["verbs/validation.jsonl", "verbs/test.jsonl"],
            "max_prompts": 1000, "max_new_tokens": MAX_NEW_TOKENS,
        },
        "loss": method.loss,
        "train": {
            "samples_per_step": SAMPLES, "max_steps": steps, "micro_batch_tokens": 16 * CONTEXT,
            "learning_rate": cell.rate, "min_learning_rate": cell.rate / 10, "warmup_steps": max(1, steps // 12),
            "checkpoint_every": steps, "keep_checkpoints": 1,
        },
        "workers": {"collators": 1, "device": device},
    }  # fmt: skip
    if method.taught:
        tables["teacher"] = [{"model": f"models/{GEMMA3}", "context_length": CONTEXT, "dtype": dtype}]
    if method.fraction == 1:
        tables["data"]["field"] = "prompt"
    if method.fraction:
        tables["rollout"] = {"fraction": method.fraction, "max_new_tokens": MAX_NEW_TOKENS, "stop": ["\n"]}
        tables["queue"] = {"block_size": round(method.fraction * SAMPLES)}
    return Job(cell.name, toml_of(tables))


def models_of(state: Path) -> tuple[Path, Path]:
    """Return the directories of student and teacher."""
    return state / "models" / SMOLLM2, state / "models" / GEMMA3
