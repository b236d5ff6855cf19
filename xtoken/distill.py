"""Whole runs from Python: the processes, checkpoints and files of `xtoken run`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from xtoken.objects import as_files
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError, XtokenError
from xtoken_services.common.run.defaults import fill_run_defaults, load_run
from xtoken_services.common.run.status import RunState, RunStatus
from xtoken_services.supervisor.local_run import run_locally
from xtoken_services.supervisor.run_files import Curve
from xtoken_services.supervisor.run_record import MODEL, SUMMARY

log = logging.getLogger("xtoken.run")


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


class RunCallback(Protocol):
    """Events of a run. Subclass it and override some; the others do nothing.

    A resumed run has those since its checkpoint. An error in one is logged, and does not end the run.
    """

    def on_start(self, status: dict[str, Any]) -> None:
        """Take the first status, which has the fields of `GET /v1/runs/{id}`."""

    def on_status(self, status: dict[str, Any]) -> None:
        """Take the status, about twice a second."""

    def on_step(self, metrics: dict[str, Any]) -> None:
        """Take the line of `steps.jsonl` of an optimiser step, without the ids."""

    def on_evaluation(self, metrics: dict[str, Any]) -> None:
        """Take a line of `eval.jsonl`."""

    def on_checkpoint(self, step: int) -> None:
        """Take the step of a written checkpoint."""

    def on_end(self, status: dict[str, Any]) -> None:
        """Take the last status, whose key `state` says how the run ended."""


class _Lines(Curve):
    """Lines of a growing file that were not taken yet."""

    def _reset(self) -> None:
        super()._reset()
        self._new: dict[int, dict[str, Any]] = {}

    def _add(self, raw: bytes) -> dict[str, Any] | None:
        line = super()._add(raw)
        if line is not None:
            self._new[line["step"]] = line
        return line

    def take(self, last: int) -> list[dict[str, Any]]:
        """Return the new lines up to a step: later ones may be of an earlier start, until the trainer cuts the file."""
        self.refresh()
        return [self._new.pop(step) for step in sorted(self._new) if step <= last]


class CallbackView:
    """A view of a run's progress that calls the methods of a callback.

    Args:
        callback: Has them.
        output: The run's directory.
    """

    def __init__(self, callback: RunCallback, output: Path) -> None:
        self._callback = callback
        self._steps, self._evaluations = _Lines(output / "steps.jsonl"), _Lines(output / "eval.jsonl")
        self._checkpoint: int | None = None
        self._began: int | None = None  # step of the checkpoint that it resumes from, -1 without one

    def show(self, status: RunStatus) -> None:
        """Call the methods of what is new."""
        if self._began is None:
            self._checkpoint, self._began = status.checkpoint, -1 if status.checkpoint is None else status.checkpoint
            self._call("on_start", status.document())
        self._call("on_status", status.document())
        # The line of a step has the number of those before it, that of an evaluation includes the last one.
        for name, lines, own in (("on_step", self._steps, 1), ("on_evaluation", self._evaluations, 0)):
            for line in lines.take((status.step or 0) - own):
                if line["step"] + own > self._began:
                    self._call(name, line)
        if status.checkpoint != self._checkpoint:
            self._checkpoint = status.checkpoint
            self._call("on_checkpoint", status.checkpoint)

    def stopping(self, *, now: bool) -> None:
        """Do nothing: the next status shows it."""

    def end(self, status: RunStatus) -> None:
        """Call the methods of what is new, and that of the end."""
        self.show(status)
        self._call("on_end", status.document())

    def _call(self, name: str, value: Any) -> None:
        try:
            getattr(self._callback, name)(value)
        except Exception:
            log.exception("%s of the callback has failed", name)


def distill(
    run_file: Path | str | None = None,
    *,
    settings: Sequence[str] = (),
    callback: RunCallback | None = None,
    show: bool = False,
    loss: str | None = None,
    **document: Any,
) -> DistillResult:
    """Distil in processes of this machine, and return a `DistillResult` at the end; call it again to resume a run.

    Args:
        run_file: A run file, whose relative paths are relative to it; None: the settings are given by name.
        settings: `table.key=value` pairs that replace settings, as `xtoken run --set` takes them.
        callback: Its methods are called at the run's events.
        show: Print progress as `xtoken run` does; otherwise it is logged, which `logging.basicConfig(level="INFO")`
            shows.
        loss: `module:Class` of a custom loss, for `loss.mode = "custom"`.
        **document: The tables of a run file by name: `student="DIR"`, `teacher="DIR"`, `data="train.jsonl"`,
            `train={"max_steps": 100}`. Relative paths are relative to the current directory. Models may be objects of
            `transformers`, `student={"model": model, "tokenizer": tokenizer}`; a text may be a `datasets.Dataset` or
            any iterable of records, which is read once. They are kept in the user's cache by their content.

    Raises:
        ConfigError: A setting is wrong, or settings are given both by a run file and by name.
        InputError: A file cannot be read, or an object not be written.
        XtokenError: The run failed, or was stopped.
    """
    spec, notes = _specification(run_file, settings, document)
    for note in notes:
        log.info("default: %s", note)
    view = CallbackView(callback, spec.output) if callback else None
    result = run_locally(spec, show=show, loss=loss, view=view)
    if result.state != RunState.COMPLETED:
        raise XtokenError(result.error or f"the run was stopped; call distill again to resume it: {spec.output}")
    return DistillResult(spec.output, spec.output / MODEL, json.loads((spec.output / SUMMARY).read_text("utf-8")))


def dry_run(
    run_file: Path | str | None = None,
    *,
    settings: Sequence[str] = (),
    loss: str | None = None,
    measure: bool = False,
    **document: Any,
) -> list[str]:
    """Check everything that `distill` would check at its start, and start nothing.

    Args:
        run_file: As of `distill`, and so are `settings`, `loss` and the tables.
        settings: See there.
        loss: See there.
        measure: Take three steps with the real models, for the time of the run, and whether the teacher is better.
        **document: See there.

    Returns:
        Lines: defaults that were filled in, sizes of text and models, memory of each process, disk, warnings.

    Raises:
        XtokenError: As of `distill`.
    """
    from xtoken_services.cli.dry_run import check_run

    spec, notes = _specification(run_file, settings, document)
    return [*(f"default: {note}" for note in notes), *check_run(spec, loss, measure=measure)]


def _specification(
    run_file: Path | str | None, settings: Sequence[str], document: Mapping[str, Any]
) -> tuple[RunSpec, list[str]]:
    """Return a run's specification, and a line for every default that was filled in."""
    if run_file is None:
        return fill_run_defaults(as_files(document), Path.cwd(), source="distill()", settings=settings)
    if document:
        raise ConfigError(f"settings are in {run_file} and by name ({', '.join(document)}): replace them by `settings`")
    return load_run(Path(run_file), settings)
