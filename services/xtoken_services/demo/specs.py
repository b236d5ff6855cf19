"""The three runs of the demo, as the TOML files a user would write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TEACHER, STUDENT = "teacher", "student"
CROSS_ENTROPY, DISTILLED = "cross-entropy", "distilled"
UNTRAINED_TEACHER = "untrained-teacher"
EVAL_BYTES = 40_000


@dataclass(frozen=True)
class Training:
    """Training of the teacher, or of both students.

    Attributes:
        steps: Optimiser steps.
        samples_per_step: Documents of a step.
        context_length: Tokens of a document at most, for student and teacher.
        learning_rate: At its highest.
        eval_every: Steps between two evaluations.
        seed: Of the order of documents.
    """

    steps: int = 96
    samples_per_step: int = 4
    context_length: int = 256
    learning_rate: float = 3e-3
    eval_every: int = 32
    seed: int = 0


TEACHER_TRAINING, STUDENT_TRAINING = Training(steps=216, eval_every=72), Training()


def write_run_files(out: Path, teacher: Training, student: Training) -> dict[str, Path]:
    """Write `teacher.toml`, and `cross-entropy.toml` and `distilled.toml`, which are equal but for the loss.

    Args:
        out: Where models and corpus are; the runs get directories below it.
        teacher: How the teacher is trained.
        student: How both students are trained.

    Returns:
        The file of each run, by its name, in the order in which they run.
    """
    taught = f'[teacher]\nmodel = "{TEACHER}"\ncontext_length = {student.context_length}\n\n'
    plain = "kl_loss_weight = 0.0\nce_loss_scale = 1.0"
    texts = {
        TEACHER: run_file(TEACHER, UNTRAINED_TEACHER, "", plain, teacher),
        CROSS_ENTROPY: run_file(CROSS_ENTROPY, STUDENT, taught, plain, student),
        DISTILLED: run_file(
            DISTILLED, STUDENT, taught, 'mode = "chain"\nkl_loss_weight = 1.0\nce_loss_scale = 1.0', student
        ),
    }
    files = {name: out / f"{name}.toml" for name in texts}
    for name, file in files.items():
        file.write_text(texts[name], encoding="utf-8")
    return files


def run_file(name: str, model: str, teacher: str, loss: str, training: Training) -> str:
    """Return the text of a run file; its paths are relative to its own directory."""
    return f"""# Created by `xtoken demo`; rerun it with `xtoken run {name}.toml`.
name = "{name}"
output = "runs/{name}"
seed = {training.seed}

[student]
model = "{model}"
context_length = {training.context_length}

{teacher}[data]
path = "corpus/train.jsonl"

[eval]
path = "corpus/heldout.jsonl"
every = {training.eval_every}
max_bytes = {EVAL_BYTES}

[loss]
{loss}

[train]
samples_per_step = {training.samples_per_step}
max_steps = {training.steps}
micro_batch_tokens = {training.samples_per_step * training.context_length}
learning_rate = {training.learning_rate}
min_learning_rate = {float(f"{training.learning_rate / 20:.6g}")}
warmup_steps = {max(1, training.steps // 10)}
weight_decay = 0.01
checkpoint_every = {training.steps}

[workers]
collators = 2
device = "cpu"
"""
