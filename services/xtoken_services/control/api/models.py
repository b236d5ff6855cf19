"""Request and response models of the API, besides the RunSpec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, RootModel
from pydantic_core import CoreSchema

from xtoken_core.config.spec import RunSpec
from xtoken_services.supervisor.run_record import RunState


class ApiModel(BaseModel):
    """Base of the response models, whose fields are described by the strings after them."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class WorkerStatus(ApiModel):
    """A worker process of a run."""

    name: str
    kind: str
    """`queue`, `collator`, `rollout`, `teacher` or `trainer`."""
    state: str
    """`waiting`, `running`, `finished` or `stopped`."""
    pid: int | None
    incarnation: int
    """Number of its last attempt, which names its log file."""
    restarts: int
    exit_code: int | None
    phase: str
    """Phase that it reports: `load` or `run`."""
    activity: str = ""
    """Work that takes long, such as `evaluating: 40%`; empty while it takes steps."""
    progress: int
    """Units of work finished by the current attempt."""
    heartbeat_age_s: float | None
    """Age of its last heartbeat at the supervisor's last check."""
    where: str = ""
    """Machine that it runs on, if not the control plane's."""


class QueueStatus(ApiModel):
    """Contents of a run's queue."""

    samples: int
    bytes: int
    memory_limit: int
    tasks: dict[str, dict[str, int]]
    """Number of samples by task and state."""


class RunSummary(ApiModel):
    """Summary of a run."""

    id: str
    name: str
    output: Path
    created: str
    """UTC, as all times."""
    began: str | None = None
    """Time of the last start or resume."""
    ended: str | None = None
    launch: int = 1
    """Number of its current launch: 1, and one more with every resume."""
    state: RunState
    error: str = ""
    exit_code: int | None = None
    step: int | None = None
    """Optimiser steps taken."""
    steps: int | None = None
    """Optimiser steps of the complete run."""


class RunStatus(RunSummary):
    """Status of a run."""

    text_read: float | None = None
    """Fraction (0 to 1) of the text that has been read, while the run's files are validated."""
    checking: str | None = None
    """What is built or read for long before any process is started."""
    skipped: int | None = None
    """Positions without a sample."""
    dead: int | None = None
    """Positions abandoned after repeated failures."""
    queue: QueueStatus | None = None
    workers: list[WorkerStatus] = []
    last: dict[str, Any] | None = None
    """Metrics of the last step."""
    evaluation: dict[str, Any] | None = None
    """Metrics of the last evaluation."""
    first_evaluation: dict[str, Any] | None = None
    """Metrics of the first evaluation, before any step."""
    best_evaluation: dict[str, Any] | None = None
    """Metrics of the evaluation with the fewest bits per byte, without that before any step."""
    checkpoint: int | None = None
    """Step of the newest checkpoint."""
    summary: dict[str, Any] | None = None
    """Number of positions by outcome, once the run is complete."""
    spec: dict[str, Any] = {}
    """Specification, with absolute paths."""


class RunPage(ApiModel):
    """Page of runs, newest first."""

    runs: list[RunSummary]
    next: str | None = None
    """`cursor` of the next page; null on the last page."""


class AnyRunSpec(RootModel[dict[str, Any]]):
    """Specification of a run: a whole one, or a short one that is completed."""

    @classmethod
    def __get_pydantic_json_schema__(cls, _: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the schema of whole and short specifications."""
        short = {
            "title": "ShortRunSpec",
            "description": "A `RunSpec` without `output` or a model's `context_length`.",
            "type": "object",
            "properties": {name: {"type": "object"} for name in ("student", "data")},
            "required": ["student", "data"],
        }
        return {"anyOf": [handler(RunSpec.__pydantic_core_schema__), short], "title": "AnyRunSpec"}


class DryRun(ApiModel):
    """Result of a dry run, which validates a run without starting it."""

    spec: RunSpec
    """Specification, with absolute paths."""
    defaults: list[str] = []
    """Defaults that were filled in, with their reasons."""
    records: int
    positions: int
    """Samples of the complete run, over all epochs."""
    steps: int
    queue_bytes: int
    """Upper bound of the samples between collators and trainer, in bytes."""
    processes: list[str]


class RunMetrics(ApiModel):
    """Metrics of a run: one object per step, and one per evaluation."""

    model_config = ConfigDict(
        use_attribute_docstrings=True,
        json_schema_extra={
            "examples": [
                {
                    "steps": [{"step": 0, "loss": 5.1, "ce_loss": 4.0, "kl_loss": 4.7, "tokens_per_second": 812.0}],
                    "eval": [{"step": 0, "bits_per_byte": 3.2}],
                    "steps_total": 1,
                    "eval_total": 1,
                }
            ]
        },
    )

    steps: list[dict[str, Any]]
    """If there were more than `points`, each is the mean over an interval, at its last step."""
    eval: list[dict[str, Any]]
    steps_total: int
    """Number of steps that the trainer has recorded."""
    eval_total: int


class Artifact(ApiModel):
    """File of a run."""

    path: str
    """Path relative to the run's output, as in `GET /v1/runs/{id}/artifacts/{path}`."""
    bytes: int
    modified: str


class Artifacts(ApiModel):
    """Files of a run, ordered by path."""

    artifacts: list[Artifact]
    truncated: bool = False
    """True if the list is incomplete."""


class LogFile(ApiModel):
    """Log of one attempt of a worker."""

    worker: str
    attempt: int
    bytes: int


class Note(ApiModel):
    """Event in the history of a run."""

    id: int
    at: str
    worker: str
    message: str


class Live(ApiModel):
    """Liveness."""

    live: bool = Field(default=True)


class Ready(ApiModel):
    """Readiness."""

    ready: bool
    age_s: float
    """Largest number of seconds since the last housekeeping or the last iteration of a supervisor."""
    reason: str = ""
