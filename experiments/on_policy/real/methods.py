"""The compared runs: the teacher's answers as targets, chain on them, and chain on the student's own completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.jobs import Job
from experiments.on_policy.methods import toml_of
from experiments.real.methods import GEMMA3, SMOLLM2

MAX_NEW_TOKENS = 16
CONTEXT = 128


@dataclass(frozen=True)
class Size:
    """One size of the experiment.

    Attributes:
        name: Of its result file.
        steps: Optimiser steps.
        samples: Prompts of a step.
        rates: Learning rates, all of them with the first seed.
        seeds: Seeds of the data's order.
        train: Prompts of the training.
        validation: Prompts of the validation.
        test: Prompts of the test.
        evaluations: Evaluations after the one before the first step.
    """

    name: str
    steps: int
    samples: int
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    train: int
    validation: int
    test: int
    evaluations: int

    @property
    def directory(self) -> str:
        """Directory of the task's files below the state's."""
        return f"verbs-{self.name}"


SIZES = {
    size.name: size
    for size in (
        Size("full", 120, 32, (5e-5, 2e-4), (0, 1, 2), train=4096, validation=60, test=240, evaluations=3),
        Size("reduced", 12, 16, (2e-4,), (0,), train=200, validation=24, test=80, evaluations=1),
    )
}
"""One for a GPU, one for two cores."""


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
    def text(self) -> str:
        """File of the training text."""
        return "prompts.jsonl" if self.fraction == 1 else "answers.jsonl"

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
ASKED_FOR = ("supervised", "off_policy", "on_policy")
"""These are run first."""


@dataclass(frozen=True)
class Cell:
    """One run: a method at a learning rate and a seed of the data's order."""

    method: str
    rate: float
    seed: int


def run_name(cell: Cell, size: Size) -> str:
    """Return the name of a run's directory."""
    return f"{size.directory}-{cell.method.replace('_', '-')}-{cell.rate:g}-s{cell.seed}"


def job(cell: Cell, size: Size, *, device: str = "auto", rollout: Mapping[str, Any] | None = None) -> Job:
    """Return the run of a cell, whose models and texts lie in the state's directory.

    Args:
        cell: The cell.
        size: The experiment's size.
        device: `workers.device` of the run.
        rollout: More settings of `[rollout]`, for runs with completions.
    """
    method, name = METHODS[cell.method], run_name(cell, size)
    dtype = "float32" if device == "cpu" else "bfloat16"
    tables: dict[str, Any] = {
        "name": name,
        "output": f"runs/{name}",
        "seed": cell.seed,
        "student": {"model": f"models/{SMOLLM2}", "context_length": CONTEXT, "dtype": dtype},
        "data": {"path": f"{size.directory}/{method.text}", "append_eos": False},
        "eval": {"path": f"{size.directory}/text.jsonl", "every": size.steps // size.evaluations},
        "eval.tasks": {
            "path": [f"{size.directory}/validation.jsonl", f"{size.directory}/test.jsonl"],
            "max_prompts": 1000, "max_new_tokens": MAX_NEW_TOKENS,
        },
        "loss": method.loss,
        "train": {
            "samples_per_step": size.samples, "max_steps": size.steps, "micro_batch_tokens": 16 * CONTEXT,
            "learning_rate": cell.rate, "min_learning_rate": cell.rate / 10, "warmup_steps": max(1, size.steps // 12),
            "checkpoint_every": size.steps, "keep_checkpoints": 1,
        },
        "workers": {"collators": 1, "device": device},
    }  # fmt: skip
    if method.taught:
        tables["teacher"] = [{"model": f"models/{GEMMA3}", "context_length": CONTEXT, "dtype": dtype}]
    if method.fraction == 1:
        tables["data"]["field"] = "prompt"
    if method.fraction:
        tables["rollout"] = {"fraction": method.fraction, "max_new_tokens": MAX_NEW_TOKENS, "stop": ["\n"]}
        tables["rollout"] |= rollout or {}
        tables["queue"] = {"block_size": round(method.fraction * size.samples)}
    return Job(name, toml_of(tables))


def models_of(state: Path) -> tuple[Path, Path]:
    """Return the directories of student and teacher."""
    return state / "models" / SMOLLM2, state / "models" / GEMMA3
