"""The checks of `xtoken run --dry-run`: those of a start, without writing below the run's output."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from xtoken_core.config.rollout import RolloutSpec
from xtoken_core.config.spec import RunSpec
from xtoken_core.config.train import ReportSpec
from xtoken_core.errors import ConfigError, InputError
from xtoken_services.common.files.input_files import check_input_files
from xtoken_services.common.processes.progress import spinner
from xtoken_services.common.run.custom_loss import check_custom_loss
from xtoken_services.common.run.inspection import check_as_workers
from xtoken_services.common.run.loss_import import check_importable
from xtoken_services.common.run.quantities import span
from xtoken_services.common.run.run_warnings import is_size
from xtoken_services.supervisor.launch_check import check_launch
from xtoken_services.supervisor.local_run import run_locally
from xtoken_services.supervisor.progress import WARNING
from xtoken_services.supervisor.run import check_output

MEASURED_STEPS = 3


def check_run(spec: RunSpec, loss: str | None, *, measure: bool = False) -> list[str]:
    """Check a run as its start would: text is read and indexed, and what the loss needs about tokenizers is built.

    Args:
        spec: The run's specification, with defaults.
        loss: `module:Class` of a custom loss.
        measure: Take a few steps too.

    Returns:
        Lines: its sizes, and warnings about its settings.

    Raises:
        XtokenError: The start would be refused; the text has the reason.
    """
    check_launch(spec)
    check_custom_loss(spec.loss, loss)
    if loss is not None:
        check_importable(loss)
    check_input_files(spec)
    from xtoken_services.common.run.start_checks import check_start  # after the checks that cost nothing

    with tempfile.TemporaryDirectory(prefix="xtoken-") as directory, spinner("checking the run's files"):
        elsewhere = spec.model_copy(update={"output": Path(directory) / "output"})
        resolved, lines = check_start(elsewhere, output=spec.output)
        lines += check_as_workers(resolved)
    check_output(resolved.model_copy(update={"spec": spec}))
    shown = [line if is_size(line) else f"{WARNING}{line}" for line in lines]
    return [*shown, _measured_time(spec, loss, resolved.steps)] if measure else shown


def _measured_time(spec: RunSpec, loss: str | None, steps: int) -> str:
    """Take `MEASURED_STEPS` with the real models, and return an estimate of the whole run's time in a line.

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
        changes["eval"] = spec.eval.model_copy(update={"every": MEASURED_STEPS})
    if spec.rollout is not None:  # the steps of a cold start take less
        changes["rollout"] = spec.rollout.model_copy(update={"after": RolloutSpec.model_fields["after"].default})
    place = next(path for path in spec.output.parents if path.exists())
    with tempfile.TemporaryDirectory(prefix=".xtoken-", dir=place) as directory, spinner("taking a few steps"):
        output = Path(directory) / "output"
        result = run_locally(spec.model_copy(update=changes | {"output": output}), show=False, loss=loss)
        if result.exit_code:
            raise InputError(
                f"the trial of {MEASURED_STEPS} steps has not completed: {result.error or 'it was stopped'}"
            )
        files = [output / "steps.jsonl", *([output / "eval.jsonl"] if spec.eval is not None else ())]
        rows, *evaluated = ([json.loads(line) for line in file.read_text("utf-8").splitlines()] for file in files)
    each = statistics.median(row["seconds"] for row in rows[1:] or rows)
    text, whole = f"time: {each:.3g} s a step, the median after the first of {len(rows)}", each * steps
    if spec.eval is not None:
        count, seconds = -(-steps // spec.eval.every) + 1, evaluated[0][-1]["seconds"]
        whole += count * seconds
        text += f", {seconds:.3g} s an evaluation, of which there are {count}"
    peak = max(row["memory_peak_bytes"] for row in rows) / 2**30
    return f"{text}: about {span(whole)} for {steps:,} steps; the trainer's peak was {peak:.2f} GiB"
