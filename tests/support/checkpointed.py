"""A run's directory as a trainer leaves it, without the run: `resolved.json`, checkpoints, lines."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.support.runs import resolved_run, revised_run
from tests.support.tiny_run import documents
from xtoken_core.config.resolved import ResolvedRun
from xtoken_services.demo.vocabularies import train_teacher_tokenizer
from xtoken_services.trainer.checkpoint import Checkpoints, Cursor
from xtoken_services.trainer.optimizer import StudentOptimizer
from xtoken_services.trainer.student import Student, load_student


def run_directory(directory: Path, model: PreTrainedModel, *, positions: int = 80, **changes: Any) -> ResolvedRun:
    """A run whose output is `directory` and whose student is a model with a tokenizer beside it; `changes` as dicts."""
    student = directory / "student"
    train_teacher_tokenizer(documents(40, seed=1), student, vocabulary=300)
    model.save_pretrained(student)
    changes["student"] = {"model": student} | changes.get("student", {})
    run = revised_run(resolved_run(directory, positions=positions), output=directory, **changes)
    (directory / "resolved.json").write_text(run.model_dump_json(), encoding="utf-8")
    return run


def train(run: ResolvedRun, steps: list[int]) -> dict[int, Student]:
    """Checkpoints at these steps, of weights drawn anew for each; the students that they hold, by step."""
    found = {}
    checkpoints = Checkpoints(run.spec.output / "checkpoints", run)
    for step in steps:
        student = load_student(run.spec, torch.device("cpu"))
        optimizer = StudentOptimizer(student, run.spec.train, run.steps)
        draw = torch.Generator().manual_seed(step)
        for weight in optimizer.weights.values():
            weight.data.copy_(torch.randn(weight.shape, generator=draw) * 0.1)
        student.sync_weights()
        checkpoints.save(Cursor(step=step, updates=step, trained=8 * step, tokens=100 * step), optimizer.state())
        found[step] = student
    checkpoints.wait()
    return found


def write_lines(output: Path, name: str, rows: list[dict[str, Any]], *, torn: str = "") -> None:
    """A file of JSON lines, at whose end another may have been begun."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (output / name).write_text(text + torn, encoding="utf-8")
