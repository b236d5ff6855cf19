"""The run file of a cell, and where its models are."""

from __future__ import annotations

import json
from typing import Any

from experiments.jobs import Job
from experiments.real import instructions
from experiments.real.methods import (
    CONDITIONS,
    EVAL_BYTES,
    FIRST_RATE,
    FOR_GEMMA,
    GERMAN_TEACHER,
    METHODS,
    PATIENCE,
    QUESTIONS,
    SEEDS,
    Cell,
    Condition,
    Method,
)
from experiments.real.questions import Questions


def job(cell: Cell, *, device: str = "auto", steps: int | None = None, patience: int = PATIENCE) -> Job:
    """Return the run of a cell.

    Args:
        cell: The cell.
        device: `workers.device` of the run.
        steps: Optimiser steps instead of the condition's.
        patience: `eval.patience` of the run; 0: it goes on to its last step.
    """
    condition, method = CONDITIONS[cell.condition], METHODS[cell.method]
    steps = steps or condition.steps
    weights = dict(zip(("kl_loss_weight", "ce_loss_scale"), method.weights[cell.weight], strict=True))
    # On a CPU a compiler is needed, and a trial's few steps do not pay for it.
    computing = {"dtype": "bfloat16", "compile": condition.compiles} if device != "cpu" else {"dtype": "float32"}
    teacher: dict[str, Any] = {"context_length": condition.contexts[1], **computing}
    if questions := shown_to_teacher(cell):
        teacher["chat_template"] = f"texts/{questions.template}"
    if method.hidden:
        teacher["content"] = "hidden"
    if method.projects:
        teacher["projection"] = projection_file(condition)
    template = {"chat_template": f"texts/{instructions.TEMPLATE_FILE}"} if cell.condition == FOR_GEMMA else {}
    evaluated = [f"texts/{source}.test.jsonl" for source in (condition.source, *condition.others)]
    tables: list[tuple[str, dict[str, Any]]] = [
        ("student", {"model": student_of(cell), "context_length": condition.contexts[0], **computing, **template}),
        *(
            ("[teacher]", {"model": model, **_choice(method, number), **teacher})
            for number, model in enumerate(teachers_of(cell))
        ),
        *_data(cell),
        (
            "eval",
            {
                "path": f"texts/{condition.source}.validation.jsonl",
                "also": evaluated,
                "every": max(1, steps // condition.evaluations),
                "max_bytes": EVAL_BYTES,
                "keep_best": False,
                "patience": "none" if condition.second else patience or "none",
            },
        ),
        *(("eval.tasks", _tasks(condition)) for _ in condition.tasks[:1]),
        *(("rollout", _rollout(cell)) for _ in range(method.on_policy)),
        *(("queue", {"block_size": int(condition.documents * method.fraction)}) for _ in range(method.on_policy)),
        ("loss", method.loss if method.loss.get("dynamic_loss_scaling") else {**method.loss, **weights}),
        ("train", _train(cell, steps)),
        ("workers", {"collators": 1, "device": device}),
    ]
    lines = [f'name = "{cell.name}"', f'output = "runs/{cell.name}"', f"seed = {cell.seed}"]
    for name, table in tables:
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    options = ("--loss", method.custom) if method.custom else ()
    kept = condition.follows or cell.condition in {GERMAN_TEACHER, *(each.start for each in CONDITIONS.values())}
    discards = ("checkpoints",) if kept else ("checkpoints", "model")
    return Job(cell.name, "\n".join(lines) + "\n", options, discards=discards)


def _choice(method: Method, number: int) -> dict[str, Any]:
    """Return the name and weight of a teacher that compares its own text."""
    return {"name": f"t{number}", "weight": method.second_weight if number else 1.0} if method.routed else {}


def shown_to_teacher(cell: Cell) -> Questions | None:
    """Return the questions of which a run's teacher reads solved ones before each of them; None if it reads none."""
    source = CONDITIONS[cell.condition].source
    questions = QUESTIONS.get(source) if METHODS[cell.method].shots else None
    return questions if questions and questions.source == source else None


def teachers_of(cell: Cell) -> list[str]:
    """Return the directories of a run's teachers, relative to the state's directory, each as often as it is listed."""
    condition, method = CONDITIONS[cell.condition], METHODS[cell.method]
    found = [f"models/{condition.teacher}"] * method.teachers
    if method.second:
        (rate,) = CONDITIONS[condition.second_teacher].rates
        found.append(f"runs/{Cell(condition.second_teacher, 'ce', 'ce', rate, SEEDS[0]).name}/model")
    return found


def _data(cell: Cell) -> list[tuple[str, dict[str, Any]]]:
    """Return the tables of a run's text, or of two with their teachers."""
    condition, routed = CONDITIONS[cell.condition], METHODS[cell.method].routed
    shared = {"epochs": 1000} | ({} if condition.ends else {"append_eos": False})
    if not condition.second:
        return [("data", {"path": f"texts/{cell.text}"} | shared)]
    sources = [
        {"path": f"texts/{file}", "weight": 1 + number} | ({"teachers": [f"t{number}"]} if routed else {})
        for number, file in enumerate(cell.texts.values())
    ]
    return [("data", shared), *(("[data.sources]", source) for source in sources)]


def student_of(cell: Cell) -> str:
    """Return the directory of a run's student, relative to the state's directory."""
    condition = CONDITIONS[cell.condition]
    if condition.start:
        (rate,) = CONDITIONS[condition.start].rates
        return f"runs/{Cell(condition.start, 'ce', 'ce', rate, cell.seed).name}/model"
    return f"models/{condition.student}"


def _rollout(cell: Cell) -> dict[str, Any]:
    condition, method = CONDITIONS[cell.condition], METHODS[cell.method]
    settings = {
        "max_new_tokens": condition.completion_tokens,
        "fraction": method.fraction,
        "teacher_temperature": method.teacher_temperature,
        "temperature": method.temperature,
    }
    settings |= {"top_k": method.top_k} if method.top_k else {}
    return settings | ({"after": method.after, "learning_rate": cell.rate} if method.after else {})


def _train(cell: Cell, steps: int) -> dict[str, Any]:
    rate = FIRST_RATE if METHODS[cell.method].after else cell.rate
    return {
        "samples_per_step": CONDITIONS[cell.condition].documents,
        "max_steps": steps,
        "micro_batch_tokens": METHODS[cell.method].micro_batch_of(CONDITIONS[cell.condition]),
        "learning_rate": rate,
        "min_learning_rate": rate / 10,
        "warmup_steps": max(1, steps // 20),
        "weight_decay": 0.01,
        "checkpoint_every": steps,
        "keep_checkpoints": 1,
    }


def _tasks(condition: Condition) -> dict[str, Any]:
    files = [f"texts/{name}.jsonl" for name in condition.tasks]
    return {"path": files, "max_prompts": condition.task_prompts, "max_new_tokens": condition.task_tokens}


def projection_file(condition: Condition) -> str:
    """Return the file of a pair's projection, relative to the state's directory."""
    return f"projection-{condition.student}-{condition.teacher}.safetensors"
