"""Status of a run: one document for console, pages, `GET /v1/runs/{id}` and callbacks. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from xtoken_core.config.base import Described
from xtoken_core.config.spec import RunSpec
from xtoken_services.common.run.metric_lines import BEYOND_TEACHER, BITS, TEACHER_BITS, finite, table
from xtoken_services.common.run.verdict import Difference, Verdict, difference

RECENT_STEPS = 20
"""Steps whose mean duration is extrapolated."""


class RunState(StrEnum):
    """State of a run."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    """All its processes were gone when a control plane was restarted."""

    @property
    def over(self) -> bool:
        """Return True if the state is final; only a resume changes a final state."""
        return self not in (RunState.STARTING, RunState.RUNNING, RunState.STOPPING)


class WorkerStatus(Described):
    """A worker process of a run."""

    name: str
    kind: str
    """`queue`, `collator`, `rollout`, `teacher`, `trainer`, or `writer` of a store."""
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


class QueueStatus(Described):
    """Contents of a run's queue."""

    samples: int
    bytes: int
    memory_limit: int
    tasks: dict[str, dict[str, int]]
    """Number of samples by task and state."""


class RunSummary(Described):
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
    description: str = ""
    """What a user has written about the run."""


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
    workers: list[WorkerStatus] = []  # noqa: RUF012 - pydantic copies it
    last: dict[str, Any] | None = None
    """Metrics of the last step."""
    evaluation: dict[str, Any] | None = None
    """Metrics of the last evaluation."""
    first_evaluation: dict[str, Any] | None = None
    """Metrics of the first evaluation, before any step."""
    best_evaluation: dict[str, Any] | None = None
    """Metrics of the evaluation with the fewest bits per byte, without that before any step; with
    `rollout.stop_when_worse` of that with the highest accuracy on tasks."""
    completions: dict[str, dict[str, float]] | None = None
    """Means of `entropy`, `finished`, `completion_tokens` and `overlap_ratio` over the first and over the last 8 steps
    with completions, as `first` and `last`."""
    checkpoint: int | None = None
    """Step of the newest checkpoint."""
    sample: dict[str, Any] | None = None
    """Samples evenly spread over the run: how many were looked at, and how many of them are skipped or cut."""
    summary: dict[str, Any] | None = None
    """Number of positions by outcome, once the run is complete."""
    spec: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it
    """Specification, with absolute paths."""

    @classmethod
    def starting(cls, spec: RunSpec, run_id: str) -> RunStatus:
        """Return the status of a run that is created now, before any of its processes exists."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        return cls(
            id=run_id,
            name=spec.name,
            output=spec.output,
            created=now,
            began=now,
            state=RunState.STARTING,
            checking="",
            spec=spec.model_dump(mode="json"),
        )

    def document(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return self.model_dump(mode="json")

    @property
    def metrics(self) -> dict[str, float]:
        """Finite metrics of the last step."""
        return finite(self.last)

    @property
    def keeps_best(self) -> bool:
        """True if the run exports the weights of its best evaluation."""
        return keeps_best(self.spec)

    @property
    def exported(self) -> dict[str, Any]:
        """The evaluation of the weights that the run exports, see `exported_evaluation`."""
        return exported_evaluation(self.spec, self.summary, self.evaluation, self.best_evaluation)

    @property
    def change(self) -> Difference | None:
        """Change of the exported weights' bits per byte since step 0; None before a second evaluation."""
        first, last = self.first_evaluation or {}, self.exported
        return difference(last, first) if first.get("step") == 0 and last.get("step") else None

    @property
    def teacher_lead(self) -> Difference | None:
        """Bits per byte of the best teacher less the student's before any step; None if not both are known."""
        first = finite(self.first_evaluation)
        if first.get("step") != 0 or not {BITS, TEACHER_BITS} <= first.keys():
            return None
        return Difference(first[TEACHER_BITS] - first[BITS], first.get(BEYOND_TEACHER))

    @property
    def of_teacher(self) -> str:
        """The best teacher's result, and how it compares with the student before any step; empty without one."""
        bits, lead = finite(self.exported).get(TEACHER_BITS), self.teacher_lead
        is_other = lead is not None and lead.verdict is not Verdict.SAME
        beside = f", {lead.verdict} than the student at step 0" if lead is not None and is_other else ""
        return "" if bits is None else f"the teacher has {bits:.4f}{beside}"

    def remaining_s(self, steps: Sequence[Mapping[str, Any]] = ()) -> float | None:
        """Return the seconds until the last step and evaluation; None if unknown.

        Args:
            steps: Metrics of the last steps; left out, the last one's duration counts.
        """
        lines = [finite(line) for line in steps[-RECENT_STEPS:]] or [self.metrics]
        durations = [line["seconds"] for line in lines if line.get("seconds")]
        if self.state != RunState.RUNNING or not durations or self.step is None or self.steps is None:
            return None
        left = (self.steps - self.step) * sum(durations) / len(durations)
        return left + self.evaluations_left * finite(self.evaluation).get("seconds", 0.0)

    @property
    def evaluations_left(self) -> int:
        """Number of evaluations that are still to come, the one under way included."""
        every = table(self.spec, "eval").get("every")
        if not every or self.step is None or self.steps is None:
            return 0
        done = finite(self.evaluation).get("step", -1)
        due = {*range(0, self.steps, every), self.steps}
        return sum(at > done and at >= self.step for at in due)


def keeps_best(spec: Mapping[str, Any] | None) -> bool:
    """Return whether a run with these settings exports the weights of its best evaluation."""
    return bool(table(spec, "eval").get("keep_best"))


def goes_by_tasks(spec: Mapping[str, Any] | None) -> bool:
    """Return whether the best evaluation of a run with these settings is that with the highest accuracy on tasks."""
    return table(spec, "rollout").get("stop_when_worse") is not None


def exported_evaluation(
    spec: Mapping[str, Any] | None,
    summary: Mapping[str, Any] | None,
    last: dict[str, Any] | None,
    best: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the evaluation of the weights that a run exports: the last, or with `eval.keep_best` the best so far.

    Args:
        spec: Its settings.
        summary: The content of `summary.json`.
        last: The last line of `eval.jsonl`.
        best: Its line with the fewest bits per byte.

    Returns:
        A line of `eval.jsonl`; empty without one.
    """
    last = last or {}
    # A run whose best checkpoint was lost has exported its last weights, and its summary says so.
    exports_last = table(summary, "held_out").get("step") == last.get("step")
    return last if not best or not keeps_best(spec) or exports_last else best
