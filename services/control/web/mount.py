"""Where the web page joins the control plane's application."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from services.control.access import Access
from services.control.web import aligning, pages, session, starting
from services.control.web.gauges import Gauges

STATIC = Path(__file__).parent / "static"


def opened(access: Access) -> Access:
    """The access, with what a browser needs to ask for the token."""
    files = (f"/static/{path.relative_to(STATIC).as_posix()}" for path in STATIC.rglob("*") if path.is_file())
    return replace(access, open_paths=(*access.open_paths, session.LOGIN, *files))


def install(app: FastAPI) -> None:
    """Serve the pages; whoever lacks the token is led to where it is asked for."""
    app.state.gauges = Gauges(app.state.plane)
    for router in (starting.router, pages.router, aligning.router, session.router):
        app.include_router(router, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC))
    app.add_middleware(session.LeadToLogin)
