"""The control plane's HTTP application, with its web interface."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.staticfiles import StaticFiles

from xtoken_services.control import problems
from xtoken_services.control.api import files, health
from xtoken_services.control.api import runs as runs_api
from xtoken_services.control.api.dependencies import AppContext, problems_of
from xtoken_services.control.api.telemetry import RequestMetrics, Telemetry
from xtoken_services.control.auth import Auth, AuthMiddleware
from xtoken_services.control.http_limits import BodyLimit
from xtoken_services.control.runs import Runs
from xtoken_services.control.table_builds import TableBuilds
from xtoken_services.control.views import Views
from xtoken_services.control.web import (
    align_page,
    compare_page,
    documents,
    downloads,
    login,
    new_run,
    pages,
    suggestions,
    tables_page,
)
from xtoken_services.control.web.gauges import Gauges

DESCRIPTION = """Start, monitor, stop and resume distillation runs.

Errors are `application/problem+json` and name the invalid fields. Every request except the probes
needs the header `Authorization: Bearer TOKEN`, with the token in `~/.config/xtoken/control.token`, or in the file that
`--token-file` names."""
STATIC = Path(__file__).parent / "web" / "static"


def create_app(runs: Runs, auth: Auth | None = None) -> FastAPI:
    """Create the application.

    Args:
        runs: Runs to serve.
        auth: Authentication settings; by default only this machine has access, without a token.
    """
    views = Views(runs)
    context = AppContext(runs, views, with_open_paths(auth or Auth()))
    telemetry = Telemetry(runs, views)
    app = FastAPI(
        title="xtoken control plane",
        version=version("xtoken"),
        description=DESCRIPTION,
        responses=problems_of(400, 401, 403, 429),
        docs_url=None,  # FastAPI's page loads scripts from a CDN; `web.pages` serves Swagger UI from here
        redoc_url=None,
    )
    app.state.context, app.state.telemetry = context, telemetry
    problems.install(app)
    for router in (runs_api.router, files.router, health.router):
        app.include_router(router)
    app.add_middleware(RequestMetrics, telemetry=telemetry)
    app.add_middleware(BodyLimit, open_paths=context.auth.open_paths)
    app.add_middleware(AuthMiddleware, auth=context.auth)
    install(app)
    _describe(app)
    return app


def _describe(app: FastAPI) -> None:
    """Add the bearer token and the media type of errors to the OpenAPI description."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"token": []}, {}]
            operations = [operation for path in schema["paths"].values() for operation in path.values()]
            for response in [r for operation in operations for r in operation["responses"].values()]:
                content = response.get("content", {})
                if content.get("application/json", {}).get("schema", {}).get("$ref", "").endswith("/Problem"):
                    response["content"] = {problems.MEDIA_TYPE: content["application/json"]}
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign] # FastAPI's documented way


def with_open_paths(auth: Auth) -> Auth:
    """Return settings that also allow the login page and static files without a token."""
    files = (f"/static/{path.relative_to(STATIC).as_posix()}" for path in STATIC.rglob("*") if path.is_file())
    return replace(auth, open_paths=(*auth.open_paths, login.LOGIN, *files))


def install(app: FastAPI) -> None:
    """Add the pages, static files and the redirect to the login page."""
    app.state.gauges = Gauges(app.state.context)
    app.state.table_builds = TableBuilds(app.state.context.runs.validator.environment)
    for module in (new_run, pages, compare_page, documents, downloads, align_page, tables_page, suggestions, login):
        app.include_router(module.router, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC))
    app.add_middleware(login.LoginRedirect)
