"""Routes for a run's metrics, history, logs and files."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Response
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from xtoken_services.control.api.dependencies import Context, RunId, problems_of
from xtoken_services.control.api.models import Artifacts, LogFile, Note, RunMetrics
from xtoken_services.control.artifacts import list_files, open_file
from xtoken_services.control.logs import Follower, last_attempts, logs_in, merged, tail

MAX_POINTS = 10_000
MAX_LINES = 10_000
MAX_STEP = 2**62
FILE = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["files"])


@router.get("/metrics", responses=problems_of(404, 422))
def show_metrics(
    run_id: RunId,
    context: Context,
    after: Annotated[int, Query(ge=-1, le=MAX_STEP, description="Only steps after this one.")] = -1,
    points: Annotated[
        int, Query(ge=1, le=MAX_POINTS, description="Largest number of rows of each kind; more are averaged.")
    ] = 1000,
) -> RunMetrics:
    """Return the metrics of a run, averaged over equal intervals if there are more than `points`."""
    view = context.view(run_id)
    view.refresh()
    return RunMetrics(
        steps=view.steps.sample(after, points),
        eval=view.eval.sample(after, points),
        steps_total=len(view.steps),
        eval_total=len(view.eval),
    )


@router.get("/notes", responses=problems_of(404, 422))
def show_notes(run_id: RunId, context: Context, after: Annotated[int, Query(ge=0, le=MAX_STEP)] = 0) -> list[Note]:
    """Return the history of a run: restarts of workers with the reason, recoveries, and how it ended."""
    context.view(run_id)
    return [Note.model_validate(note, from_attributes=True) for note in context.runs.store.notes(run_id, after=after)]


@router.get("/logs/files", responses=problems_of(404, 422))
def list_logs(run_id: RunId, context: Context) -> list[LogFile]:
    """List the logs of a run: one per attempt of a worker."""
    output = context.view(run_id).output
    return [LogFile(worker=log.worker, attempt=log.attempt, bytes=log.size) for log in logs_in(output)]


@router.get(
    "/logs",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **problems_of(404, 422)},
)
def show_logs(
    run_id: RunId,
    context: Context,
    worker: Annotated[str, Query(max_length=64, description="Only this worker; by default all, merged by time.")] = "",
    attempt: Annotated[int | None, Query(ge=0, le=MAX_STEP, description="Attempt; by default the last.")] = None,
    lines: Annotated[int, Query(alias="tail", ge=0, le=MAX_LINES, description="Number of last lines.")] = 200,
    follow: Annotated[bool, Query(description="Keep sending new lines until the run is over.")] = False,
) -> Response:
    """Return the last lines of a run's logs as text."""
    view = context.view(run_id)
    logs = [log for log in logs_in(view.output) if not worker or log.worker == worker]
    if attempt is not None:
        logs = [log for log in logs if log.attempt == attempt]
    if (worker or attempt is not None) and not logs:
        raise HTTPException(404, f"the run {run_id!r} has no such log: see /v1/runs/{run_id}/logs/files")
    logs = last_attempts(logs)
    follower = Follower(view.output, worker) if follow else None
    selected = tail(logs[0], lines)[0] if worker else list(merged(logs, lines))
    first = b"".join(line + b"\n" for line in selected)
    if follower is None:
        return Response(first, media_type="text/plain; charset=utf-8")
    return StreamingResponse(_followed(first, follower.added(view.is_over)), media_type="text/plain; charset=utf-8")


async def _followed(first: bytes, added: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for lines in added:
        yield lines


@router.get("/artifacts", responses=problems_of(404, 422))
def list_artifacts(run_id: RunId, context: Context) -> Artifacts:
    """List the files of a run: checkpoints, metrics, logs, the exported model; no hidden files or caches."""
    files, more = list_files(context.view(run_id).output)
    return Artifacts.model_validate({"artifacts": files, "truncated": more})


@router.get(
    "/artifacts/{path:path}",
    response_class=FileResponse,
    responses={
        200: {"content": FILE},
        206: {"content": FILE},
        416: {"description": "Range not satisfiable."},
        **problems_of(404, 422),
    },
)
def get_artifact(run_id: RunId, path: Annotated[str, PathParameter(max_length=4096)], context: Context) -> Response:
    """Return a file, complete or in ranges."""
    output = context.view(run_id).output
    try:
        return OpenFileResponse(open_file(output, path), Path(path).name)
    except OSError as error:
        raise HTTPException(404, f"the run {run_id!r} has no file {path!r}") from error


class OpenFileResponse(FileResponse):
    """Response with an open file, so that the name is not resolved a second time; closes the descriptor."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        super().__init__(
            f"/proc/self/fd/{descriptor}",
            stat_result=os.fstat(descriptor),
            filename=name,
            media_type="application/octet-stream",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            os.close(self._descriptor)
