"""The checks of `xtoken run --dry-run`: those of a start, without writing below the run's output."""

from __future__ import annotations

import json
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from xtoken_core.config.eval import EvalSpec
from xtoken_core.config.loss import ADAPTIVE
from xtoken_core.config.rollout import RolloutSpec
from xtoken_core.config.spec import RunSpec
from xtoken_core.config.train import ReportSpec
from xtoken_core.errors import ConfigError, InputError
from xtoken_services.common.files.input_files import check_input_files
from xtoken_services.common.processes.progress import spinner
from xtoken_services.common.run.inspection import check_as_workers
from xtoken_services.common.run.loss_import import check_importable
from xtoken_services.common.run.machine import Machine
from xtoken_services.common.run.metric_lines import TEACHER_BITS, with_error
from xtoken_services.common.run.quantities import span
from xtoken_services.common.run.run_warnings import is_size
from xtoken_services.common.run.status import RunStatus
from xtoken_services.common.text.training_text import open_held_out
from xtoken_services.supervisor.launch_check import check_launch
from xtoken_services.supervisor.local_run import run_locally
from xtoken_services.supervisor.progress import WARNING
from xtoken_services.supervisor.run import check_output

MEASURED_STEPS, TRIAL_BYTES = 3, 16 << 10
"""Steps of a trial, and bytes of the held-out text on which it is evaluated on a CPU."""
NOT_MEASURED = (
    "time: --measure (measure=True) takes three steps to estimate it, and to say whether the teacher is better"
)


def check_run(spec: RunSpec, loss: str | None, *, measure: bool = False) -> list[str]:
    """Check a run as its start would: text is read and indexed, and what the loss needs about tokenizers is built.

    Args:
        spec: The run's specification, with defaults.
        loss: `module:Class` of a custom loss.
        measure: Take a few steps too.

    Returns:
        Lines: its sizes, and warnings about its settings; measured, whether the teacher is better, and the time.

    Raises:
        XtokenError: The start would be refused; the text has the reason.
    """
    check_launch(spec)
    check_importable(spec.loss, loss)
    check_input_files(spec)
    from xtoken_services.common.run.start_checks import check_start  # after the checks that cost nothing

    with tempfile.TemporaryDirectory(prefix="xtoken-") as directory, spinner("checking the run's files"):
        elsewhere = spec.model_copy(update={"output": Path(directory) / "output"})
        resolved, lines = check_start(elsewhere, output=spec.output)
        lines += check_as_workers(resolved)
    check_output(resolved.model_copy(update={"spec": spec}))
    shown = [line if is_size(line) else f"{WARNING}{line}" for line in lines]
    return [*shown, *(_measured(spec, loss, resolved.steps) if measure else [NOT_MEASURED])]


def _measured(spec: RunSpec, loss: str | None, steps: int) -> list[str]:
    """Take `MEASURED_STEPS` with the real models: say whether the teacher is better, and estimate the run's time.

    The trial has a directory of its own beside the run's output, which is removed, and logs and uploads nothing.

    Args:
        spec: The run's specification.
        loss: `module:Class` of a custom loss.
        steps: Steps of the whole run.

    Raises:
        XtokenError: The trial was refused or has failed.
    """
    if any(teacher.store_missing == "compute" for teacher in spec.teacher):
        raise ConfigError("--measure builds no store: build it by xtoken store build first")
    changes: dict[str, Any] = {"push_to": None, "report": ReportSpec()}
    changes["train"] = spec.train.model_copy(update={"max_steps": MEASURED_STEPS})
    if spec.eval is not None:
        changes["eval"] = spec.eval.model_copy(
            update={"every": MEASURED_STEPS, "max_bytes": _trial_bytes(spec.eval, spec)}
        )
    cold = spec.rollout is not None and bool(spec.rollout.after)
    if cold or spec.loss.kl_loss_weight_end == ADAPTIVE:  # it would warn of the trial's own, shorter text
        weight = spec.loss.last_kl_loss_weight if cold else spec.loss.kl_loss_weight
        changes["loss"] = spec.loss.model_copy(update={"kl_loss_weight": weight, "kl_loss_weight_end": None})
    if spec.rollout is not None:  # the steps of a cold start take less
        changes["rollout"] = spec.rollout.model_copy(update={"after": RolloutSpec.model_fields["after"].default})
    place, began = next(path for path in spec.output.parents if path.exists()), time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".xtoken-", dir=place) as directory, spinner("taking a few steps"):
        output = Path(directory) / "output"
        trial = spec.model_copy(update=changes | {"output": output})
        result = run_locally(trial, show=False, loss=loss)
        if result.exit_code:
            why = result.error or f"it was stopped by {signal.Signals(result.exit_code - 128).name}"
            raise InputError(f"the trial of {MEASURED_STEPS} steps has not completed: {why}")
        rows, evaluated = _lines(output / "steps.jsonl"), _lines(output / "eval.jsonl")
        documents = len(open_held_out(trial)) if evaluated else 0
    each = statistics.median(row["seconds"] for row in rows[1:] or rows)
    once = time.monotonic() - began - each * len(rows) - sum(row["seconds"] for row in evaluated)
    text, whole = f"time: {each:.3g} s a step, the median after the first of {len(rows)}", each * steps + once
    if spec.eval is not None:
        last, count = evaluated[-1], spec.eval.evaluations(steps)
        more = min(spec.eval.max_bytes / _trial_bytes(spec.eval, spec), documents / last["documents"])
        whole += count * more * last["seconds"]
        text += f", {more * last['seconds']:.3g} s an evaluation, of which there are {count}"
    peak = max(row["memory_peak_bytes"] for row in rows) / 2**30
    text += f", {once:.3g} s for start and end: about {span(whole)} for {steps:,} steps"
    teacher = [_of_teacher(trial, next(iter(evaluated), None))] if spec.teacher else []
    return [*teacher, f"{text}; the trainer's peak was {peak:.2f} GiB"]


def _trial_bytes(whole: EvalSpec, spec: RunSpec) -> int:
    """Return how much of the held-out text a trial is evaluated on: on a CPU a share, if its time can be scaled."""
    others = whole.tasks or whole.samples or any(teacher.store for teacher in spec.teacher)
    on_gpu = spec.workers.device != "cpu" and Machine.of_this().gpu_bytes
    return whole.max_bytes if others or on_gpu else min(whole.max_bytes, TRIAL_BYTES)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []


def _of_teacher(trial: RunSpec, first: dict[str, Any] | None) -> str:
    """Return in one line whether the best teacher is better than the student, by the evaluation before any step."""
    lead = RunStatus.starting(trial, trial.name).model_copy(update={"first_evaluation": first}).teacher_lead
    if first is None or lead is None:
        return "teacher: not measured beside the student, as no held-out text (eval.path) is read by both"
    bits = f"{first[TEACHER_BITS]:.4f} bits per byte of held-out text, the student {with_error(first)}"
    return f"teacher beside the student: {lead}: {bits}"
