"""Installation of the web interface in the application."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from xtoken_services.control.auth import Auth
from xtoken_services.control.table_builds import TableBuilds
from xtoken_services.control.web import (
    align_page,
    compare_page,
    downloads,
    login,
    new_run,
    pages,
    suggestions,
    tables_page,
)
from xtoken_services.control.web.gauges import Gauges

STATIC = Path(__file__).parent / "static"


def with_open_paths(auth: Auth) -> Auth:
    """Return settings that also allow the login page and static files without a token."""
    files = (f"/static/{path.relative_to(STATIC).as_posix()}" for path in STATIC.rglob("*") if path.is_file())
    return replace(auth, open_paths=(*auth.open_paths, login.LOGIN, *files))


def install(app: FastAPI) -> None:
    """Add the pages, static files and the redirect to the login page."""
    app.state.gauges = Gauges(app.state.context)
    roots = app.state.context.runs.validator.roots
    app.state.table_builds = TableBuilds(roots.environment if roots is not None else {})
    for module in (new_run, pages, compare_page, downloads, align_page, tables_page, suggestions, login):
        app.include_router(module.router, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC))
    app.add_middleware(login.LoginRedirect)
