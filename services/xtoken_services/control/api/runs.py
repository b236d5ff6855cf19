"""Routes that start, list, show, stop, resume and remove runs."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, HTTPException, Query, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from xtoken_core.config.spec import RunSpec
from xtoken_core.config.validation_errors import message_of
from xtoken_core.data_plane.address import Address
from xtoken_services.common.files.input_files import check_input_files
from xtoken_services.common.run.inspection import check_as_workers, inspect_run
from xtoken_services.common.run.resolve import largest_row
from xtoken_services.common.run.status import RunState, RunStatus
from xtoken_services.control.api.dependencies import AppContext, Context, RunId, problems_of
from xtoken_services.control.api.models import AnyRunSpec, DryRun, RunPage
from xtoken_services.control.api.short_specs import complete, read_document, start_short
from xtoken_services.supervisor.process_spec import build_process_specs
from xtoken_services.supervisor.run import Run

VALIDATION_WAIT_S = 3.0
"""Seconds to wait for the validation of a run's files before responding."""
MAX_DRY_RUNS = 2
MAX_PAGE = 200
MAX_DESCRIPTION = 4000
MAX_CURSOR = 2**62
UNUSED_ADDRESS = "ipc:///tmp/queue"

router = APIRouter(prefix="/v1/runs", tags=["runs"])
_dry_runs = threading.BoundedSemaphore(MAX_DRY_RUNS)

Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern=r"^[!-~]+$",
        description="A second request with the same key and specification returns the first run.",
    ),
]
EXAMPLES = json.loads(Path(__file__).with_name("examples.json").read_text("utf-8"))
Specification = Annotated[AnyRunSpec, Body(openapi_examples=EXAMPLES)]


@router.post(
    "", status_code=201, responses={200: {"model": RunStatus | DryRun}, **problems_of(400, 409, 413, 422, 503)}
)
def start_run(
    document: Specification, context: Context, response: Response, dry_run: bool = False, key: Key = None
) -> RunStatus | DryRun:
    """Start a run.

    The body has the fields of a run file as JSON; relative paths are below the first `--root`, a relative `output`
    below the runs' directory. Without `output` or a model's `context_length` it is completed as `xtoken run` completes
    a run file, in the first free directory of the run's name; the response has the choices in `output` and `spec`.

    The files are validated first; if that takes long, the response comes before, and an error shows in the run's
    state. With `dry_run` nothing more is done. The status is 200 for a dry run and for a known key.
    """
    try:
        spec, errors = read_document(document.root)
        if errors:
            raise RequestValidationError(_in_the_body(errors))
        if dry_run:
            response.status_code = 200
            return dry_run_of(context, *((spec, []) if spec else complete(context.runs, document.root)))
        run, row = context.runs.start(spec, key=key) if spec else start_short(context.runs, document.root, key)
    except ValidationError as error:
        raise RequestValidationError(_in_the_body(error.errors(include_url=False))) from error
    if run is None:
        response.status_code = 200
    else:
        discard_if_invalid(context, run)
    response.headers["Location"] = f"/v1/runs/{row.id}"
    return context.status(row.id)


@router.get("", responses=problems_of(422))
def list_runs(
    context: Context,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 50,
    cursor: Annotated[int | None, Query(ge=0, le=MAX_CURSOR, description="`next` of the previous page.")] = None,
    state: Annotated[list[RunState], Query(max_length=16, description="Only this state; may be repeated.")] = [],  # noqa: B006
    name: Annotated[str, Query(max_length=64)] = "",
) -> RunPage:
    """Return a page of runs, newest first."""
    rows = context.runs.store.page(limit + 1, before=cursor, states=state, name=name)
    following = str(rows[limit - 1]["seq"]) if len(rows) > limit else None
    return RunPage.model_validate({"runs": rows[:limit], "next": following})


@router.get("/{run_id}", responses=problems_of(404, 422))
def show_run(run_id: RunId, context: Context) -> RunStatus:
    """Return the status of a run."""
    return context.status(run_id)


@router.post("/{run_id}/stop", status_code=202, responses=problems_of(404, 422))
def stop_run(run_id: RunId, context: Context, now: bool = False) -> RunStatus:
    """Stop a run gracefully, after a checkpoint; with `now` immediately. Responds before the run is over."""
    context.view(run_id)
    context.runs.stop(run_id, now=now)
    return context.status(run_id)


@router.post("/{run_id}/resume", status_code=202, responses=problems_of(404, 409, 422, 503))
def resume_run(run_id: RunId, context: Context) -> RunStatus:
    """Resume a stopped, failed or interrupted run from its last checkpoint, with its original settings."""
    context.view(run_id)
    run = context.runs.resume(run_id)
    run.started.wait(VALIDATION_WAIT_S)
    return context.status(run_id)


@router.delete("/{run_id}", status_code=204, responses=problems_of(404, 409, 422))
def remove_run(run_id: RunId, context: Context, files: bool = False) -> Response:
    """Remove a run that is over; with `files` delete its output directory, checkpoints and model too."""
    context.view(run_id)
    context.runs.remove(run_id, files=files)
    context.views.drop(run_id)
    return Response(status_code=204)


@router.delete("/{run_id}/checkpoints", responses=problems_of(404, 409, 422))
def free_checkpoints(run_id: RunId, context: Context) -> list[str]:
    """Delete the checkpoints of a run that is over, except its newest and that of its best evaluation.

    The model and all curves stay. Returns the names of those that were deleted.
    """
    context.view(run_id)
    return context.runs.free_checkpoints(run_id)


@router.put("/{run_id}/description", responses=problems_of(404, 422))
def describe_run(
    run_id: RunId,
    context: Context,
    text: Annotated[str, Body(max_length=MAX_DESCRIPTION, openapi_examples={"text": {"value": "twice the text"}})],
) -> RunStatus:
    """Replace what is written about a run, in any state; the body is the text as a JSON string."""
    context.view(run_id)
    context.runs.store.change(run_id, description=text)
    return context.status(run_id)


def discard_if_invalid(context: AppContext, run: Run) -> None:
    """Remove a run that failed validation before any process was started.

    Raises:
        XtokenError: The validation error.
    """
    run.started.wait(VALIDATION_WAIT_S)
    if run.refusal is not None:
        context.runs.discard(run)
        context.views.drop(run.id)
        raise run.refusal


def _in_the_body(errors: Sequence[ErrorDetails]) -> list[dict[str, Any]]:
    return [{**error, "loc": ("body", *error["loc"]), "msg": message_of(error, RunSpec)} for error in errors]


def dry_run_of(context: AppContext, spec: RunSpec, defaults: list[str]) -> DryRun:
    """Validate a run's settings and files as for a start.

    Args:
        context: The control plane.
        spec: The settings.
        defaults: A line for every default among them.

    Raises:
        XtokenError: The run is invalid.
        HTTPException: 503, too many dry runs are in progress.
    """
    spec = context.runs.validate(spec)
    check_input_files(spec)
    if not _dry_runs.acquire(blocking=False):
        raise HTTPException(503, "too many dry runs are in progress: retry in a moment", {"Retry-After": "5"})
    scratch = Path(tempfile.mkdtemp(prefix="xtoken-dry-"))
    try:
        # Its token of the Hub, which the child has not, was looked for above.
        checked = spec.model_copy(update={"output": scratch, "push_to": None})
        environment = context.runs.validator.environment
        resolved, warnings = inspect_run(checked, lambda activity, done: None, environment, output=spec.output)
        warnings += check_as_workers(resolved, environment)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        _dry_runs.release()
    return DryRun(
        spec=spec,
        defaults=defaults,
        warnings=warnings,
        records=resolved.records,
        positions=resolved.positions,
        steps=resolved.steps,
        queue_bytes=resolved.span * largest_row(spec),
        processes=[
            member.name
            for member in build_process_specs(resolved, scratch, [Address.parse(UNUSED_ADDRESS)] * spec.workers.nodes)
        ],
    )
