"""What the control plane's interface takes and gives, beside the RunSpec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from services.supervisor.run_record import RunState
from xtoken_core.config.spec import RunSpec


class Answer(BaseModel):
    """What an answer is made of: strings after fields describe them."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class WorkerStatus(Answer):
    """One process of a run."""

    name: str
    kind: str
    """`queue`, `collator`, `teacher` or `trainer`."""
    state: str
    """`waiting`, `running`, `finished` or `stopped`."""
    pid: int | None
    incarnation: int
    """The number of its last start; its log is named by it."""
    restarts: int
    exit_code: int | None
    phase: str
    """What it says it does: `load` or `run`."""
    progress: int
    """Units of work it has finished."""
    heartbeat_age_s: float | None
    """Seconds from its last heartbeat to the supervisor's last look."""
    where: str = ""
    """The machine that it is on, if that is not the control plane's."""


class QueueStatus(Answer):
    """What a run's queue holds."""

    samples: int
    bytes: int
    memory_limit: int
    tasks: dict[str, dict[str, int]]
    """Per task, how many samples are in which state."""


class RunSummary(Answer):
    """A run, as the list shows it."""

    id: str
    name: str
    output: Path
    created: str
    """UTC, like every time here."""
    began: str | None = None
    """When it was last started or resumed."""
    ended: str | None = None
    life: int = 1
    """How often it has been started."""
    state: RunState
    error: str = ""
    exit_code: int | None = None
    step: int | None = None
    """Optimiser steps taken."""
    steps: int | None = None
    """Optimiser steps of the whole run."""


class RunStatus(RunSummary):
    """A run."""

    text_read: float | None = None
    """While the run's files are checked: the share of its text that has been looked through, 0 to 1."""
    skipped: int | None = None
    dead: int | None = None
    queue: QueueStatus | None = None
    workers: list[WorkerStatus] = []
    last: dict[str, Any] | None = None
    """The metrics of its last step."""
    evaluation: dict[str, Any] | None = None
    """Its last reading of the held-out text."""
    checkpoint: int | None = None
    """The step that its newest checkpoint goes on from."""
    summary: dict[str, Any] | None = None
    """Its account of every position, once it is complete."""
    spec: dict[str, Any] = {}
    """What was asked for, with absolute paths."""


class RunPage(Answer):
    """Runs, the newest first."""

    runs: list[RunSummary]
    next: str | None = None
    """The `cursor` of the next page; null on the last."""


class DryRun(Answer):
    """What a run would be; nothing was started and nothing is left of the check."""

    spec: RunSpec
    """As it would run, with absolute paths."""
    records: int
    positions: int
    """Samples of the whole run, repetitions included."""
    steps: int
    queue_bytes: int
    """What the samples between collators and trainer can take at most."""
    processes: list[str]


class RunMetrics(Answer):
    """A run's curves: one object per step, and one per reading of the held-out text."""

    model_config = ConfigDict(use_attribute_docstrings=True, json_schema_extra={
        "examples": [{
            "steps": [{"step": 0, "loss": 5.1, "ce_loss": 4.0, "kl_loss": 4.7, "tokens_per_second": 812.0}],
            "eval": [{"step": 0, "bits_per_byte": 3.2}], "steps_total": 1, "eval_total": 1,
        }]
    })  # fmt: skip

    steps: list[dict[str, Any]]
    """If there were more than `points`, each is the mean of a stretch, under its last step."""
    eval: list[dict[str, Any]]
    steps_total: int
    """Lines that the trainer has written."""
    eval_total: int


class Artifact(Answer):
    """A file that a run has written."""

    path: str
    """Relative to the run's output; what `GET /v1/runs/{id}/artifacts/{path}` takes."""
    bytes: int
    modified: str


class Artifacts(Answer):
    """The files of a run, by path."""

    artifacts: list[Artifact]
    truncated: bool = False
    """Whether there are more than are listed."""


class LogFile(Answer):
    """One start of one worker, as far as it has a log."""

    worker: str
    attempt: int
    bytes: int


class Note(Answer):
    """Something that has happened to a run."""

    id: int
    at: str
    worker: str
    message: str


class Live(Answer):
    """The process answers."""

    live: bool = Field(default=True)


class Ready(Answer):
    """Whether the control plane works."""

    ready: bool
    age_s: float
    """Seconds since the oldest piece of work that must recur was last completed: a round of housekeeping, or of a run's
    supervisor."""
    reason: str = ""
