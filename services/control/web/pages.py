"""The list of runs, a run's pages, and what their buttons do."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from services.control.api.dependencies import AppContext, Context, RunId
from services.control.api.files import MOST_FILES
from services.control.api.runs import CHECK_WITHIN_S, LARGEST_CURSOR
from services.control.artifacts import listed
from services.control.logs import last_attempts, logs_in, merged, tail
from services.control.web.charts import CHARTS
from services.control.web.form import to_toml
from services.control.web.gauges import gauges_of
from services.control.web.render import PageRoute, page
from services.control.web.run_view import RunView
from services.supervisor.run_record import RunState
from xtoken_core.config.spec import RunSpec

PAGE = 50
LOG_LINES = 400
NOTES = 50
STATUS_ENDING = ".status"
"""Of the files that tell a later control plane how a process ended; a reader has the page of the run for that."""
GROUPS = {
    "": (),
    "going": tuple(state for state in RunState if not state.over),
    "completed": (RunState.COMPLETED,),
    "ended": (RunState.FAILED, RunState.STOPPED, RunState.INTERRUPTED),
}
"""Which states a tab of the list shows."""
LOG_LINE = re.compile(
    r"(?:(?P<worker>[\w.-]+) \| )?(?:(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ) )?(?:(?P<level>[A-Z]+) )?(?P<text>.*)"
)

router = APIRouter(route_class=PageRoute)

Group = Literal["", "going", "completed", "ended"]
Cursor = Annotated[int | None, Query(ge=0, le=LARGEST_CURSOR)]


@router.get("/")
def list_runs(
    request: Request, context: Context, group: Group = "", name: Annotated[str, Query(max_length=64)] = "",
    cursor: Cursor = None,
) -> Response:  # fmt: skip
    """The runs; only their table, where a page that is open asks for it."""
    rows = context.runs.store.page(PAGE + 1, before=cursor, states=GROUPS[group], name=name.strip())
    counts = context.runs.store.counts()
    tabs = [
        (key, label, sum(counts.get(state, 0) for state in GROUPS[key] or RunState))
        for key, label in (("", "All"), ("going", "Going"), ("completed", "Completed"), ("ended", "Stopped or failed"))
    ]
    following = rows[PAGE - 1]["seq"] if len(rows) > PAGE else None
    part = "runs_table.html" if "hx-request" in request.headers else "runs.html"
    return page(
        request, part, runs=[RunView(row) for row in rows[:PAGE]], tabs=tabs, group=group, name=name, cursor=cursor,
        following=following, any_run=bool(counts),
    )  # fmt: skip


@router.get("/docs")
def show_docs(request: Request) -> Response:
    """Return the API reference."""
    return page(request, "docs.html")


@router.get("/runs/{run_id}")
def show_run(request: Request, run_id: RunId, context: Context) -> Response:
    """A run's curves, workers and news."""
    gauges_of(request).watch(run_id)
    return page(request, "run.html", tab="overview", charts=CHARTS, **_news(context, run_id))


@router.get("/runs/{run_id}/live")
def show_news(request: Request, run_id: RunId, context: Context, tab: str = "overview") -> Response:
    """What of a run's page changes: its head on every tab, and on the first its figures, workers and news."""
    return page(request, "run_live.html", tab=tab, **_news(context, run_id))


@router.get("/runs/{run_id}/gauges")
def show_gauges(request: Request, run_id: RunId, context: Context, after: float = 0.0) -> JSONResponse:
    """What was sampled of a run by time: its queue, and this machine's GPUs."""
    context.view(run_id)
    return JSONResponse(gauges_of(request).since(run_id, after), headers={"Cache-Control": "no-store"})


@router.get("/runs/{run_id}/log")
def show_log(
    request: Request, run_id: RunId, context: Context, worker: Annotated[str, Query(max_length=64)] = ""
) -> Response:  # fmt: skip
    """The last lines of a run's logs."""
    output = context.view(run_id).output
    logs = last_attempts(logs_in(output))
    chosen = [log for log in logs if log.worker == worker]
    lines = tail(chosen[0], LOG_LINES)[0] if chosen else list(merged(logs, LOG_LINES)) if not worker else []
    found = [LOG_LINE.match(line.decode("utf-8", "replace")) for line in lines]
    part = "log_lines.html" if "hx-request" in request.headers else "run_log.html"
    return page(
        request, part, tab="log", lines=[match.groupdict() for match in found if match], worker=worker,
        workers=[log.worker for log in logs], **_news(context, run_id),
    )  # fmt: skip


@router.get("/runs/{run_id}/configuration")
def show_configuration(request: Request, run_id: RunId, context: Context) -> Response:
    """What a run was asked to do, as a run file."""
    news = _news(context, run_id)
    given = news["run"].spec
    spec = RunSpec.model_validate(given)
    short = spec.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    return page(
        request, "run_configuration.html", tab="configuration", short=to_toml(short), whole=to_toml(given), **news
    )


@router.get("/runs/{run_id}/files")
def show_files(request: Request, run_id: RunId, context: Context) -> Response:
    """A run's files, to take away."""
    found, more = listed(context.view(run_id).output, MOST_FILES)
    folders: dict[str, list[dict[str, Any]]] = {"": []} if any("/" not in file["path"] for file in found) else {}
    for file in found:
        folder, _, name = file["path"].rpartition("/")
        if folder == "logs" and name.endswith(STATUS_ENDING):
            continue
        folders.setdefault(folder, []).append({**file, "name": name})
    part = "files.html" if "hx-request" in request.headers else "run_files.html"
    return page(request, part, tab="files", folders=folders, more=more, **_news(context, run_id))


@router.post("/runs/{run_id}/stop")
def stop(run_id: RunId, context: Context, now: bool = False) -> Response:
    """Stop a run, and show it."""
    context.view(run_id)
    context.runs.stop(run_id, now=now)
    return RedirectResponse(f"/runs/{run_id}", 303)


@router.post("/runs/{run_id}/resume")
def resume(run_id: RunId, context: Context) -> Response:
    """Go on with a run, and show it."""
    context.view(run_id)
    run = context.runs.resume(run_id)
    run.started.wait(CHECK_WITHIN_S)
    return RedirectResponse(f"/runs/{run_id}", 303)


@router.post("/runs/{run_id}/remove")
def remove(run_id: RunId, context: Context, files: bool = False) -> Response:
    """Forget a run that is over, its files too if asked, and show the others."""
    context.view(run_id)
    context.runs.remove(run_id, files=files)
    context.views.drop(run_id)
    return RedirectResponse("/", 303)


def _news(context: AppContext, run_id: str) -> dict[str, Any]:
    """What the templates of a run's page name."""
    view = context.view(run_id)
    notes = context.runs.store.notes(run_id, limit=NOTES)
    return {"run": RunView(context.status(run_id), list(view.steps.recent)), "notes": notes[::-1]}
