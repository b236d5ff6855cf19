"""Pages: the list of runs, the pages of a run with their actions, and the API reference."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from pydantic import BaseModel, Field, ValidationError

from xtoken_core.config.spec import RunSpec
from xtoken_services.common.run.baseline import baseline_of, baseline_output
from xtoken_services.common.run.resume import CHECKPOINTS
from xtoken_services.common.run.run_text import resolved_text, to_toml, without_defaults
from xtoken_services.common.run.status import RunState
from xtoken_services.control.api.dependencies import AppContext, Context, RunId
from xtoken_services.control.api.runs import (
    MAX_CURSOR,
    MAX_DESCRIPTION,
    describe_run,
    discard_if_invalid,
    free_checkpoints,
    remove_run,
    resume_run,
    stop_run,
)
from xtoken_services.control.artifacts import list_files
from xtoken_services.control.logs import last_attempts, logs_in, merged, tail
from xtoken_services.control.views import KEPT_VIEWS
from xtoken_services.control.web.charts import charts_of
from xtoken_services.control.web.form import Form
from xtoken_services.control.web.gauges import gauges_of
from xtoken_services.control.web.render import PageRoute, page
from xtoken_services.control.web.run_view import RunView, run_views
from xtoken_services.supervisor.json_files import read_json
from xtoken_services.supervisor.run_record import SUMMARY

PAGE_SIZE = 50
LOG_LINES = 400
NOTES = 50
STATUS_SUFFIX = ".status"
"""Suffix of the exit status files beside the logs, which the page of files leaves out."""
TABS = {
    "": (),
    "active": tuple(state for state in RunState if not state.over),
    "completed": (RunState.COMPLETED,),
    "ended": (RunState.FAILED, RunState.STOPPED, RunState.INTERRUPTED),
}
"""Run states in each tab of the list; empty for all."""
TAB_LABELS = {"": "All", "active": "Active", "completed": "Completed", "ended": "Stopped or failed"}
LOG_LINE = re.compile(
    r"(?:(?P<worker>[\w.-]+) \| )?(?:(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ) )?(?:(?P<level>[A-Z]+) )?(?P<text>.*)"
)
router = APIRouter(route_class=PageRoute)
Tab = Literal["", "active", "completed", "ended"]
Cursor = Annotated[int | None, Query(ge=0, le=MAX_CURSOR)]


@router.get("/")
def list_runs(
    request: Request,
    context: Context,
    tab: Tab = "",
    name: Annotated[str, Query(max_length=64)] = "",
    cursor: Cursor = None,
    sort: Literal["", "result"] = "",
) -> Response:
    """Show the runs, newest first or by result; for an htmx request only their table."""
    most = KEPT_VIEWS if sort else PAGE_SIZE + 1
    rows = context.runs.store.page(most, before=cursor, states=TABS[tab], name=name.strip())
    runs = run_views(context, rows if sort else rows[:PAGE_SIZE])
    if sort:
        runs = sorted(runs, key=lambda run: math.inf if run.bits is None else run.bits)[:PAGE_SIZE]
    counts = context.runs.store.counts()
    tabs = [
        (key, label, sum(counts.get(state, 0) for state in TABS[key] or RunState)) for key, label in TAB_LABELS.items()
    ]
    following = rows[PAGE_SIZE - 1]["seq"] if len(rows) > PAGE_SIZE and not sort else None
    part = "runs_table.html" if "hx-request" in request.headers else "runs.html"
    return page(
        request,
        part,
        runs=runs,
        sort=sort,
        tabs=tabs,
        tab=tab,
        name=name,
        cursor=cursor,
        following=following,
        any_run=bool(counts),
    )


@router.get("/docs")
def show_docs(request: Request) -> Response:
    """Return the API reference."""
    return page(request, "docs.html")


@router.get("/runs/{run_id}")
def show_run(request: Request, run_id: RunId, context: Context) -> Response:
    """Show the charts, workers and history of a run."""
    gauges_of(request).watch(run_id)
    variables = _variables(context, run_id)
    charts = charts_of(variables["run"].spec, variables["run"].same_tokenizer)
    return page(request, "run.html", tab="overview", groups=charts, longest=MAX_DESCRIPTION, **variables)


@router.get("/runs/{run_id}/live")
def show_live(request: Request, run_id: RunId, context: Context, tab: str = "overview") -> Response:
    """Return the changing parts of a run's page: its header, and on the first tab its metrics, workers and history."""
    return page(request, "run_live.html", tab=tab, **_variables(context, run_id))


@router.get("/runs/{run_id}/gauges")
def show_gauges(request: Request, run_id: RunId, context: Context, after: float = 0.0) -> JSONResponse:
    """Return time series of a run's queue and of this machine's GPUs."""
    context.view(run_id)
    return JSONResponse(gauges_of(request).since(run_id, after), headers={"Cache-Control": "no-store"})


@router.get("/runs/{run_id}/log")
def show_log(
    request: Request, run_id: RunId, context: Context, worker: Annotated[str, Query(max_length=64)] = ""
) -> Response:
    """Show the last lines of a run's logs."""
    output = context.view(run_id).output
    logs = last_attempts(logs_in(output))
    chosen = [log for log in logs if log.worker == worker]
    lines = tail(chosen[0], LOG_LINES)[0] if chosen else list(merged(logs, LOG_LINES)) if not worker else []
    matches = [LOG_LINE.match(line.decode("utf-8", "replace")) for line in lines]
    part = "log_lines.html" if "hx-request" in request.headers else "run_log.html"
    return page(
        request,
        part,
        tab="log",
        lines=[match.groupdict() for match in matches if match],
        worker=worker,
        workers=[log.worker for log in logs],
        **_variables(context, run_id),
    )


@router.get("/runs/{run_id}/configuration")
def show_configuration(request: Request, run_id: RunId, context: Context) -> Response:
    """Show the specification of a run as a run file."""
    variables = _variables(context, run_id)
    spec = RunSpec.model_validate(variables["run"].spec)
    return page(
        request,
        "run_configuration.html",
        tab="configuration",
        short=to_toml(without_defaults(spec)),
        complete=resolved_text(spec, []),
        **variables,
    )


@router.get("/runs/{run_id}/files")
def show_files(request: Request, run_id: RunId, context: Context) -> Response:
    """Show the files of a run, for download."""
    files, more = list_files(context.view(run_id).output)
    folders: dict[str, list[dict[str, Any]]] = {"": []} if any("/" not in file["path"] for file in files) else {}
    for file in files:
        folder, _, name = file["path"].rpartition("/")
        if folder == "logs" and name.endswith(STATUS_SUFFIX):
            continue
        folders.setdefault(folder, []).append({**file, "name": name})
    part = "files.html" if "hx-request" in request.headers else "run_files.html"
    sizes = {
        begin: sum(file["bytes"] for file in files if file["path"].startswith(begin)) for begin in ("", CHECKPOINTS)
    }
    return page(request, part, tab="files", folders=folders, more=more, sizes=sizes, **_variables(context, run_id))


@router.get("/runs/{run_id}/rollouts")
def show_rollouts(request: Request, run_id: RunId, context: Context) -> Response:
    """Show the newest completions of a run; for an htmx request only these."""
    samples = read_samples(context.view(run_id).output)
    part = "rollouts.html" if "hx-request" in request.headers else "run_rollouts.html"
    return page(request, part, tab="rollouts", samples=samples, levels=LEVELS, **_variables(context, run_id))


@router.post("/runs/{run_id}/stop")
def stop(run_id: RunId, context: Context, now: bool = False) -> Response:
    """Stop a run and show it."""
    stop_run(run_id, context, now)
    return RedirectResponse(f"/runs/{run_id}", 303)


@router.post("/runs/{run_id}/resume")
def resume(run_id: RunId, context: Context) -> Response:
    """Resume a run and show it."""
    resume_run(run_id, context)
    return RedirectResponse(f"/runs/{run_id}", 303)


@router.post("/runs/{run_id}/free")
def free(run_id: RunId, context: Context) -> Response:
    """Delete the checkpoints of a run that nothing needs, and show its files."""
    free_checkpoints(run_id, context)
    return RedirectResponse(f"/runs/{run_id}/files", 303)


@router.post("/runs/{run_id}/description")
def describe(run_id: RunId, context: Context, form: Form) -> Response:
    """Replace what is written about a run, and show it."""
    describe_run(run_id, context, form.get("text", "").strip()[:MAX_DESCRIPTION])
    return RedirectResponse(f"/runs/{run_id}", 303)


@router.post("/runs/{run_id}/baseline")
def start_baseline(run_id: RunId, context: Context) -> Response:
    """Start the run's baseline, the same run with cross-entropy only, and show both side by side.

    One that `xtoken run --baseline` has finished is listed, and nothing is trained.
    """
    spec = baseline_of(RunSpec.model_validate(context.status(run_id).spec))
    if (spec.output / SUMMARY).is_file():
        return RedirectResponse(f"/compare?run={run_id}&run={context.runs.add_finished(spec.output).id}", 303)
    run, row = context.runs.start(spec)
    if run is not None:
        discard_if_invalid(context, run)
    return RedirectResponse(f"/compare?run={run_id}&run={row.id}", 303)


@router.post("/runs/{run_id}/remove")
def remove(run_id: RunId, context: Context, files: bool = False) -> Response:
    """Remove a run that is over, with its files if requested, and show the list."""
    remove_run(run_id, context, files)
    return RedirectResponse("/", 303)


def _variables(context: AppContext, run_id: str) -> dict[str, Any]:
    """Return the variables that all templates of a run's page use."""
    view = context.view(run_id)
    notes = context.runs.store.notes(run_id, limit=NOTES)
    run = RunView(context.status(run_id), list(view.steps.recent), view.same_tokenizer)
    directory = baseline_output(view.output)
    baseline = context.runs.store.run_with_output(directory) if run.has_baseline else None
    return {
        "run": run,
        "notes": notes[::-1],
        "baseline": baseline.id if baseline is not None else None,
        "baseline_made": run.has_baseline and (directory / SUMMARY).is_file(),
    }


FILE = "rollouts.json"
LEVELS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Nats from which a chunk has the next colour of the heat map."""
Token = tuple[Annotated[str, Field(max_length=1024)], int]
"""Text, and number of its chunk; -1: none, as in a prompt."""


class SampleTeacher(BaseModel):
    """A completion beside one teacher.

    Attributes:
        number: The teacher's.
        student: The student's tokens, prompt included.
        teacher: The teacher's.
        divergence: By number of the chunk, nats.
    """

    number: int = 0
    student: Annotated[list[Token], Field(max_length=1024)]
    teacher: Annotated[list[Token], Field(max_length=1024)]
    divergence: dict[int, float | None]

    def level(self, chunk: int) -> int | None:
        """Return the colour of a chunk in the heat map, 0 for the least divergence; None without one."""
        nats = self.divergence.get(chunk)
        return None if nats is None else bisect_right(LEVELS, nats)


class Sample(BaseModel):
    """A completion.

    Attributes:
        step: The step that trained it.
        version: Step of the weights that generated it.
        teachers: One entry for each teacher.
    """

    step: int
    version: int
    teachers: Annotated[list[SampleTeacher], Field(max_length=64)]


class Samples(BaseModel):
    """Content of the file, the newest completion first."""

    samples: Annotated[list[Sample], Field(max_length=64)]


def read_samples(output: Path) -> list[Sample]:
    """Return the completions in a run's directory; none if the file is missing or holds something else."""
    content = read_json(output / FILE)
    try:
        return Samples.model_validate(content).samples if content is not None else []
    except ValidationError:
        return []
