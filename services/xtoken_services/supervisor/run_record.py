"""Result and record of a run; the record is `run.json` in its output directory, replaced atomically."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from xtoken_core.atomic import atomic_write
from xtoken_core.config.spec import RunSpec
from xtoken_core.config.validation_errors import describe
from xtoken_core.errors import InputError
from xtoken_services.common.run.status import RunState
from xtoken_services.supervisor.json_files import read_json

FILE, SPEC, SUMMARY, MODEL = "run.json", "spec.json", "summary.json", "model"
LONGEST_REASON = 300
VERSION = 1
"""Version of `run.json`; a file without one was written before versions existed and has the same fields."""


@dataclass(frozen=True)
class RunResult:
    """End of a run.

    Attributes:
        state: Its last state.
        error: Reason of a failure, in one line; for a run that was stopped, what was lost and which workers failed.
        exit_code: 0 if it completed, the fatal worker's status or 1 if it failed, 130 if it was stopped.
    """

    state: RunState
    error: str = ""
    exit_code: int = 0


class WorkerRecord(BaseModel):
    """A worker's last start, by which a later supervisor recognises its process."""

    pid: int | None = None
    identity: dict[str, Any] | None = None
    attempt: int = 0
    restarts: int = 0
    exit_code: int | None = None
    log: str | None = None


class RunRecord(BaseModel):
    """The content of `run.json`; a start that was refused has only state, error and exit code."""

    version: int = VERSION
    state: RunState | None = None
    error: str = ""
    exit_code: int | None = None
    began: str = ""
    run: str | None = None
    supervisor: dict[str, Any] = {}
    workers: dict[str, WorkerRecord] = {}

    @classmethod
    def of(cls, result: RunResult) -> RunRecord:
        """Return the record of a run that has ended."""
        return cls(state=result.state, error=result.error, exit_code=result.exit_code)


def write_record(output: Path, record: RunRecord) -> None:
    """Replace a run's `run.json` by the fields that are set.

    Raises:
        OSError: It cannot be written; the previous one is kept.
    """
    write_json(output / FILE, {"version": VERSION} | record.model_dump(mode="json", exclude_unset=True))


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON file atomically.

    Raises:
        OSError: It cannot be written; the previous one is kept.
    """
    atomic_write(path, json.dumps(document, indent=2) + "\n")


def read_record(output: Path) -> RunRecord:
    """Return a run's `run.json`; one without any field if there is none, or it is no JSON object.

    Raises:
        InputError: A later version of xtoken has written it, or a field has another type.
    """
    document = read_json(output / FILE) or {}
    version = document.get("version", 0)
    if not isinstance(version, int) or version > VERSION:
        raise InputError(
            f"{output / FILE} has version {version}, and this xtoken reads versions up to {VERSION}: update xtoken, or "
            "choose another output"
        )
    try:
        return RunRecord.model_validate(document)
    except ValidationError as error:
        reason = describe(error, RunRecord)[:LONGEST_REASON]
        raise InputError(
            f"{output / FILE} is no record of a run ({reason}): remove it, or choose another output"
        ) from error


def is_finished(spec: RunSpec) -> bool:
    """Return whether a run of exactly these settings has written its model, and its summary, which comes last."""
    output = spec.output
    if not ((output / SUMMARY).is_file() and (output / MODEL).is_dir()):
        return False
    try:
        # Compared by value, so that a setting that did not exist yet counts as its default.
        return RunSpec.model_validate(read_json(output / SPEC) or {}) == spec
    except ValidationError:
        return False


def step_of_early_end(output: Path) -> int | None:
    """Return the steps that a complete run has taken if it has ended early (`eval.patience`); None if it has not."""
    summary = read_json(output / SUMMARY) or {}
    step = summary.get("steps")
    return step if "stopped_early" in summary and isinstance(step, int) else None


def has_ended_early(output: Path, step: int) -> bool:
    """Return whether the summary in a directory is of a run that has ended early, at the step of its last checkpoint.

    Args:
        output: The run's directory.
        step: Step of the newest checkpoint.
    """
    return step_of_early_end(output) == step
