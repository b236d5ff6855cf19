"""A run's curves, logs, files and history, as its trainer and workers have written them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import anyio
from fastapi import APIRouter, HTTPException, Query, Response
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from services.control.api.dependencies import Context, RunId, problems_of
from services.control.api.models import Artifacts, LogFile, Note, RunMetrics
from services.control.artifacts import listed, open_file
from services.control.logs import Follower, last_attempts, logs_in, merged, tail
from services.control.views import View
from services.supervisor.run_record import RunState

MOST_POINTS = 10_000
MOST_LINES = 10_000
MOST_FILES = 10_000
FOLLOW_S = 0.5
FARTHEST_STEP = 2**62
FILE = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["files"])


@router.get("/metrics", responses=problems_of(404, 422))
def show_metrics(
    run_id: RunId,
    context: Context,
    after: Annotated[int, Query(ge=-1, le=FARTHEST_STEP, description="Only steps beyond this one.")] = -1,
    points: Annotated[
        int, Query(ge=1, le=MOST_POINTS, description="How many of each kind at most; more are thinned out to means.")
    ] = 1000,
) -> RunMetrics:
    """Return a run's curves, thinned out evenly to at most `points` points each."""
    view = context.view(run_id)
    view.refresh()
    return RunMetrics(
        steps=view.steps.sample(after, points), eval=view.eval.sample(after, points),
        steps_total=len(view.steps), eval_total=len(view.eval),
    )  # fmt: skip


@router.get("/notes", responses=problems_of(404, 422))
def show_notes(
    run_id: RunId, context: Context, after: Annotated[int, Query(ge=0, le=FARTHEST_STEP)] = 0
) -> list[Note]:  # fmt: skip
    """What has happened to a run: workers restarted and why, control planes that took it over, how it ended."""
    context.view(run_id)
    return [Note.model_validate(note, from_attributes=True) for note in context.runs.store.notes(run_id, after=after)]


@router.get("/logs/files", responses=problems_of(404, 422))
def list_logs(run_id: RunId, context: Context) -> list[LogFile]:
    """Every log of a run: one per start of a worker."""
    output = context.view(run_id).output
    return [LogFile(worker=log.worker, attempt=log.attempt, bytes=log.size) for log in logs_in(output)]


@router.get("/logs", response_class=StreamingResponse, responses={
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **problems_of(404, 422)
})  # fmt: skip
def show_logs(
    run_id: RunId,
    context: Context,
    worker: Annotated[str, Query(max_length=64, description="One worker; all, merged by time, if left out.")] = "",
    attempt: Annotated[int | None, Query(ge=0, le=FARTHEST_STEP, description="Which start; the last.")] = None,
    lines: Annotated[int, Query(alias="tail", ge=0, le=MOST_LINES, description="How many last lines.")] = 200,
    follow: Annotated[bool, Query(description="Go on with what is added, until the run is over.")] = False,
) -> Response:
    """The last lines of a run's logs as text."""
    view = context.view(run_id)
    logs = [log for log in logs_in(view.output) if not worker or log.worker == worker]
    if attempt is not None:
        logs = [log for log in logs if log.attempt == attempt]
    if (worker or attempt is not None) and not logs:
        raise HTTPException(404, f"the run {run_id!r} has no such log: see /v1/runs/{run_id}/logs/files")
    logs = last_attempts(logs)
    follower = Follower(view.output, worker) if follow else None
    found = tail(logs[0], lines)[0] if worker else list(merged(logs, lines))
    first = b"".join(line + b"\n" for line in found)
    if follower is None:
        return Response(first, media_type="text/plain; charset=utf-8")
    return StreamingResponse(_followed(view, first, follower), media_type="text/plain; charset=utf-8")


async def _followed(view: View, first: bytes, follower: Follower) -> AsyncIterator[bytes]:
    yield first
    while True:
        status = await run_in_threadpool(view.status)
        over = status is None or RunState(status["state"]).over
        news = await run_in_threadpool(follower.news)
        if news:
            yield news
        if over:
            return
        await anyio.sleep(FOLLOW_S)


@router.get("/artifacts", responses=problems_of(404, 422))
def list_artifacts(run_id: RunId, context: Context) -> Artifacts:
    """The files of a run: checkpoints, curves, logs, the exported model. Hidden files and caches are left out."""
    found, more = listed(context.view(run_id).output, MOST_FILES)
    return Artifacts.model_validate({"artifacts": found, "truncated": more})


@router.get("/artifacts/{path:path}", response_class=FileResponse, responses={
    200: {"content": FILE}, 206: {"content": FILE}, 416: {"description": "No such range of the file."},
    **problems_of(404, 422),
})  # fmt: skip
def get_artifact(run_id: RunId, path: Annotated[str, PathParameter(max_length=4096)], context: Context) -> Response:
    """One file, whole or in ranges."""
    output = context.view(run_id).output
    try:
        return OpenFileResponse(open_file(output, path), Path(path).name)
    except OSError as error:
        raise HTTPException(404, f"the run {run_id!r} has no file {path!r}") from error


class OpenFileResponse(FileResponse):
    """A file by its descriptor, which is closed afterwards: nothing is looked up by name a second time."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        super().__init__(
            f"/proc/self/fd/{descriptor}", stat_result=os.fstat(descriptor), filename=name,
            media_type="application/octet-stream", headers={"X-Content-Type-Options": "nosniff"},
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            os.close(self._descriptor)
