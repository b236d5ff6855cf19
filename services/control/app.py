"""The control plane's HTTP interface."""

from __future__ import annotations

from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Response
from pydantic import BaseModel, Field

from services.control import problems
from services.control.access import LocalOnly
from services.control.lines import lines_after
from services.control.problems import Problem
from services.control.record import RunState
from services.control.runs import Run, Runs
from xtoken_core.config.spec import RunSpec

CHECK_WITHIN_S = 3.0
MAX_LINES = 10_000


class WorkerStatus(BaseModel):
    """One process of a run."""

    name: str
    kind: str
    state: str
    pid: int | None
    incarnation: int
    restarts: int
    exit_code: int | None
    phase: str
    progress: int
    heartbeat_age_s: float | None
    """Seconds since the queue last heard of it."""


class QueueStatus(BaseModel):
    """What a run's queue holds."""

    samples: int
    bytes: int
    memory_limit: int
    tasks: dict[str, dict[str, int]]
    """Per task, how many samples are in which state."""


class RunSummary(BaseModel):
    """A run, as the list shows it."""

    id: str
    name: str
    output: Path
    created: datetime
    state: RunState
    error: str = ""
    exit_code: int | None = None
    step: int | None = None
    """Optimiser steps taken."""
    steps: int | None = None
    """Optimiser steps of the whole run."""


class RunStatus(RunSummary):
    """A run."""

    skipped: int | None = None
    dead: int | None = None
    queue: QueueStatus | None = None
    workers: list[WorkerStatus] = []
    last: dict[str, Any] | None = None
    """The metrics of its last step."""
    evaluation: dict[str, Any] | None = None
    """Its last reading of the held-out text."""
    summary: dict[str, Any] | None = None
    """Its account of every position, once it is complete."""


class RunList(BaseModel):
    """All runs, the newest first."""

    runs: list[RunSummary]


class RunMetrics(BaseModel):
    """A run's curves: one object per step, and one per reading of the held-out text."""

    steps: list[dict[str, Any]]
    eval: list[dict[str, Any]]


class Health(BaseModel):
    """Whether the control plane works."""

    ready: bool
    stuck: dict[str, float] = Field(
        default={}, description="Runs that nobody has looked after, and for how many seconds."
    )


def create_app(runs: Runs) -> FastAPI:
    """The application over these runs."""
    refusals: dict[int | str, dict[str, Any]] = {422: {"model": Problem}, 404: {"model": Problem}}
    app = FastAPI(title="xtoken control plane", version=version("xtoken"), responses=refusals)
    app.add_middleware(LocalOnly)
    problems.install(app)

    def known(run_id: str) -> dict[str, Any]:
        found = runs.find(run_id)
        if found is None:
            raise HTTPException(404, f"there is no run {run_id!r}")
        return found

    @app.post("/v1/runs", status_code=201)
    def start_run(spec: RunSpec, response: Response) -> RunStatus:
        """Start a run. Its files are checked first; that may go on after this has been answered."""
        run = runs.start(spec)
        run.started.wait(CHECK_WITHIN_S)
        refuse_if_unfit(runs, run)
        response.headers["Location"] = f"/v1/runs/{run.id}"
        return RunStatus.model_validate(known(run.id))

    @app.get("/v1/runs")
    def list_runs() -> RunList:
        """All runs, the newest first."""
        return RunList.model_validate({"runs": runs.list()})

    @app.get("/v1/runs/{run_id}")
    def show_run(run_id: str) -> RunStatus:
        """Where a run stands."""
        return RunStatus.model_validate(known(run_id))

    @app.post("/v1/runs/{run_id}/stop", status_code=202)
    def stop_run(run_id: str, now: bool = False) -> RunStatus:
        """Stop a run in order, or at once; it is over when its state says so."""
        found = known(run_id)
        run = runs.get(run_id)
        if run is None and not RunState(found["state"]).over:
            raise HTTPException(409, f"the run {run_id!r} belongs to another control plane, which lives: stop it there")
        if run is not None:
            run.stop(now=now)
        return RunStatus.model_validate(known(run_id))

    @app.get("/v1/runs/{run_id}/metrics")
    def show_metrics(
        run_id: str, after: int = -1, limit: Annotated[int, Query(ge=1, le=MAX_LINES)] = MAX_LINES
    ) -> RunMetrics:
        """A run's metrics of the steps beyond `after`, up to `limit` of each kind."""
        output = Path(known(run_id)["output"])
        return RunMetrics(
            steps=lines_after(output / "steps.jsonl", after, limit),
            eval=lines_after(output / "eval.jsonl", after, limit),
        )

    @app.get("/livez")
    def live() -> dict[str, bool]:
        """Whether the process answers."""
        return {"live": True}

    @app.get("/readyz")
    def ready(response: Response) -> Health:
        """Whether every run is being looked after."""
        stuck = runs.stuck()
        response.status_code = 503 if stuck else 200
        return Health(ready=not stuck, stuck=stuck)

    return app


def refuse_if_unfit(runs: Runs, run: Run) -> None:
    """Forget a run whose files or settings are unfit before anything was started, and say why.

    Raises:
        XtokenError: What the check has found.
    """
    if run.refusal is not None:
        runs.forget(run)
        raise run.refusal
