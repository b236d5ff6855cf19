"""Whole runs from Python: the processes, checkpoints and files of `xtoken run`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xtoken_core.errors import ConfigError, XtokenError
from xtoken_services.common.run.defaults import fill_run_defaults, load_run
from xtoken_services.common.run.status import RunState, RunStatus
from xtoken_services.supervisor.local_run import run_locally
from xtoken_services.supervisor.run_record import MODEL, SUMMARY

Callback = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class DistillResult:
    """A completed run.

    Attributes:
        output: The run's directory.
        model: The exported model's directory.
        summary: The content of `summary.json`.
    """

    output: Path
    model: Path
    summary: dict[str, Any]

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the lines of `eval.jsonl`; empty without an evaluation."""
        file = self.output / "eval.jsonl"
        return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []


class CallbackView:
    """A view of a run's progress that calls a function.

    Args:
        callback: Called with the run's status about twice a second, and with the last one.
    """

    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    def show(self, status: RunStatus) -> None:
        """Call the function."""
        self._callback(status.document())

    def stopping(self, *, now: bool) -> None:
        """Do nothing: the next status shows it."""

    def end(self, status: RunStatus) -> None:
        """Call the function."""
        self._callback(status.document())


def distill(
    run_file: Path | str | None = None,
    *,
    settings: Sequence[str] = (),
    callback: Callback | None = None,
    show: bool = False,
    loss: str | None = None,
    **document: Any,
) -> DistillResult:
    """Distil, in processes of this machine, and return once the run has completed; a rerun resumes it.

    Args:
        run_file: A run file, whose relative paths are relative to it; None: the settings are given by name.
        settings: `table.key=value` pairs that replace settings, as `xtoken run --set` takes them.
        callback: Called with the run's status, which has the fields of `GET /v1/runs/{id}`: `state`, `step`, `steps`,
            `last` (the last line of `steps.jsonl`), `evaluation` and others. An error in it is logged and does not end
            the run.
        show: Print progress as `xtoken run` does.
        loss: `module:Class` of a custom loss, for `loss.mode = "custom"`.
        **document: The tables of a run file by name: `student="DIR"`, `teacher="DIR"`, `data="train.jsonl"`,
            `train={"max_steps": 100}`. Relative paths are relative to the current directory.

    Raises:
        ConfigError: A setting is wrong, or settings are given both by a run file and by name.
        InputError: A file cannot be read.
        XtokenError: The run failed, or was stopped.
    """
    if run_file is not None and document:
        raise ConfigError(f"settings are in {run_file} and by name ({', '.join(document)}): replace them by `settings`")
    if run_file is not None:
        spec, _ = load_run(Path(run_file), settings)
    else:
        spec, _ = fill_run_defaults(document, Path.cwd(), source="distill()", settings=settings)
    view = CallbackView(callback) if callback else None
    result = run_locally(spec, show=show, loss=loss, view=view)
    if result.state != RunState.COMPLETED:
        raise XtokenError(result.error or f"the run was stopped; call distill again to resume it: {spec.output}")
    summary = json.loads((spec.output / SUMMARY).read_text("utf-8"))
    return DistillResult(spec.output, spec.output / MODEL, summary)
