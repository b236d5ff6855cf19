"""Request and response models of the API, besides the RunSpec."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, GetJsonSchemaHandler, RootModel
from pydantic_core import CoreSchema

from xtoken_core.config.base import Described
from xtoken_core.config.spec import RunSpec
from xtoken_services.common.run.status import RunSummary


class RunPage(Described):
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


class DryRun(Described):
    """Result of a dry run, which validates a run without starting it."""

    spec: RunSpec
    """Specification, with absolute paths."""
    defaults: list[str] = []  # noqa: RUF012 - pydantic copies it
    """Defaults that were filled in, with their reasons."""
    records: int
    positions: int
    """Samples of the complete run, over all epochs."""
    steps: int
    queue_bytes: int
    """Upper bound of the samples between collators and trainer, in bytes."""
    processes: list[str]
    warnings: list[str] = []  # noqa: RUF012 - pydantic copies it
    """An estimate of its memory, and warnings about its settings and text."""


class RunMetrics(Described):
    """Metrics of a run: one object per step, and one per evaluation."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "steps": [{"step": 0, "loss": 5.1, "ce_loss": 4.0, "kl_loss": 4.7, "tokens_per_second": 812.0}],
                    "eval": [{"step": 0, "bits_per_byte": 3.2}],
                    "steps_total": 1,
                    "eval_total": 1,
                }
            ]
        }
    )

    steps: list[dict[str, Any]]
    """If there were more than `points`, each is the mean over an interval, at its last step."""
    eval: list[dict[str, Any]]
    steps_total: int
    """Number of steps that the trainer has recorded."""
    eval_total: int


class Artifact(Described):
    """File of a run."""

    path: str
    """Path relative to the run's output, as in `GET /v1/runs/{id}/artifacts/{path}`."""
    bytes: int
    modified: str


class Artifacts(Described):
    """Files of a run, ordered by path."""

    artifacts: list[Artifact]
    truncated: bool = False
    """True if the list is incomplete."""


class LogFile(Described):
    """Log of one attempt of a worker."""

    worker: str
    attempt: int
    bytes: int


class Note(Described):
    """Event in the history of a run."""

    id: int
    at: str
    worker: str
    message: str


class Live(Described):
    """Liveness."""

    live: bool = Field(default=True)


class Ready(Described):
    """Readiness."""

    ready: bool
    age_s: float
    """Largest number of seconds since the last housekeeping or the last iteration of a supervisor."""
    reason: str = ""
