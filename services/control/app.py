"""The control plane's HTTP application."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from services.control import problems
from services.control.api import files, health
from services.control.api import runs as runs_api
from services.control.api.dependencies import AppContext, problems_of
from services.control.api.telemetry import RequestMetrics, Telemetry
from services.control.auth import Auth, AuthMiddleware
from services.control.runs import Runs
from services.control.views import Views
from services.control.web import install, opened

DESCRIPTION = """Starts, watches, stops and resumes distillation runs.

Errors are `application/problem+json` and name the fields they are about. Where the control plane is served to other
machines, every request but the probes carries `Authorization: Bearer TOKEN`."""


def create_app(runs: Runs, auth: Auth | None = None) -> FastAPI:
    """The application over these runs.

    Args:
        runs: The runs.
        auth: Who may ask; this machine, if left out.
    """
    views = Views(runs)
    context = AppContext(runs, views, opened(auth or Auth()), Telemetry(runs, views))
    app = FastAPI(
        title="xtoken control plane",
        version=version("xtoken"),
        description=DESCRIPTION,
        responses=problems_of(401, 403),
        docs_url=None,  # FastAPI's page loads scripts from a CDN; `web.pages` serves Swagger UI from here
        redoc_url=None,
    )
    app.state.context = context
    problems.install(app)
    for router in (runs_api.router, files.router, health.router):
        app.include_router(router)
    app.add_middleware(RequestMetrics, telemetry=context.telemetry)
    app.add_middleware(AuthMiddleware, auth=context.auth)
    install(app)
    _describe(app)
    return app


def _describe(app: FastAPI) -> None:
    """Say in the interface's description that there may be a token, and of what type errors are."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )  # fmt: skip
            schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"token": []}, {}]
            answers = [
                a for path in schema["paths"].values() for way in path.values() for a in way["responses"].values()
            ]
            for answer in answers:
                content = answer.get("content", {})
                if content.get("application/json", {}).get("schema", {}).get("$ref", "").endswith("/Problem"):
                    answer["content"] = {problems.MEDIA_TYPE: content["application/json"]}
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign] # FastAPI's documented way
