"""Page that builds chain tables and projections before a run, in child processes, and shows how far they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast, get_args

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import RedirectResponse
from starlette.concurrency import run_in_threadpool

from xtoken_core.errors import ConfigError
from xtoken_core.projection.pair_cache import PairKind
from xtoken_services.control.api.dependencies import AppContext, Context
from xtoken_services.control.table_builds import BusyError, TableBuilds
from xtoken_services.control.web.form import parse_form
from xtoken_services.control.web.render import PageRoute, page
from xtoken_services.control.web.tokenizer_fields import pairs_of, tokenizer_error

EMPTY = {"kind": "chain", "student": "", "teacher": "", "special_tokens": ""}
KINDS = {
    "chain": "Chain tables, for chain",
    "projection": "Projection, for P-KL, gold and H-KL",
}

router = APIRouter(route_class=PageRoute)

Directory = Annotated[str, Query(max_length=4096)]


@router.get("/tables")
def show_tables(request: Request, context: Context, student: Directory = "", teacher: Directory = "") -> Response:
    """Show the form and the builds; for an htmx request only the builds."""
    builds = builds_of(request).list()
    if "hx-request" in request.headers:
        return page(request, "table_builds.html", builds=builds)
    return _page(request, {**EMPTY, "student": student, "teacher": teacher}, {})


@router.post("/tables")
async def build_tables(request: Request, context: Context) -> Response:
    """Start a build and show it."""
    try:
        values = EMPTY | parse_form(await request.body())
    except ValueError as error:
        raise HTTPException(400, "Malformed form.") from error
    return await run_in_threadpool(_start, request, context, values)


@router.post("/tables/{build_id}/cancel")
def cancel_build(request: Request, context: Context, build_id: str) -> Response:
    """Cancel a build and show the others."""
    builds_of(request).cancel(build_id)
    return RedirectResponse("/tables", 303)


def builds_of(request: Request) -> TableBuilds:
    """Return the builds of the application that serves a request."""
    builds: TableBuilds = request.app.state.table_builds
    return builds


def _start(request: Request, context: AppContext, values: dict[str, str]) -> Response:
    errors: dict[str, str] = {}
    for name in ("student", "teacher"):
        errors |= tokenizer_error(values[name].strip(), name, context.runs.validator.roots)
    if values["kind"] not in get_args(PairKind):
        errors["kind"] = "Choose what to build."
    pairs: dict[str, str] = {}
    try:
        pairs = pairs_of(values["special_tokens"])
    except ConfigError as error:
        errors["special_tokens"] = str(error)
    if not errors:
        directories = Path(values["student"].strip()), Path(values["teacher"].strip())
        try:
            builds_of(request).start(cast(PairKind, values["kind"]), *directories, pairs)
            return RedirectResponse("/tables", 303)
        except BusyError as error:
            errors[""] = f"{str(error)[:1].upper()}{str(error)[1:]}."
    return _page(request, values, errors)


def _page(request: Request, values: dict[str, Any], errors: dict[str, str]) -> Response:
    builds = builds_of(request).list()
    return page(request, "tables.html", values=values, errors=errors, kinds=KINDS, builds=builds)
