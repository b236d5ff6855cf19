"""Page that builds chain tables and projections before a run, in child processes, and shows how far they are."""

from __future__ import annotations

from typing import Annotated, Any, cast, get_args

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from xtoken_core.config.loss import PairKind
from xtoken_services.control.api.dependencies import Context
from xtoken_services.control.table_builds import BusyError, TableBuilds
from xtoken_services.control.web.formatting import sentence
from xtoken_services.control.web.render import PageRoute, page
from xtoken_services.control.web.tokenizer_fields import EMPTY, Submitted, read_fields

KINDS = {"chain": "Chain tables, for chain", "projection": "Projection, for P-KL, gold and H-KL"}

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
def build_tables(request: Request, context: Context, values: Submitted) -> Response:
    """Start a build and show it."""
    directories, pairs, errors = read_fields(values, context.runs.validator.roots)
    if values["kind"] not in get_args(PairKind):
        errors["kind"] = "Choose what to build."
    if not errors:
        try:
            builds_of(request).start(cast(PairKind, values["kind"]), *directories, pairs)
            return RedirectResponse("/tables", 303)
        except BusyError as error:
            errors[""] = f"{sentence(str(error))}."
    return _page(request, values, errors)


@router.post("/tables/{build_id}/cancel")
def cancel_build(request: Request, context: Context, build_id: str) -> Response:
    """Cancel a build and show the others."""
    builds_of(request).cancel(build_id)
    return RedirectResponse("/tables", 303)


def builds_of(request: Request) -> TableBuilds:
    """Return the builds of the application that serves a request."""
    builds: TableBuilds = request.app.state.table_builds
    return builds


def _page(request: Request, values: dict[str, Any], errors: dict[str, str]) -> Response:
    builds = builds_of(request).list()
    return page(request, "tables.html", values=values, errors=errors, kinds=KINDS, builds=builds)
