"""Rendering of pages and page fragments from templates, with the headers of every page."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from xtoken_core.errors import XtokenError
from xtoken_services.common.run.quantities import size, span
from xtoken_services.control.api.dependencies import context_of
from xtoken_services.control.web import formatting

HERE = Path(__file__).parent
HEADERS = {
    # `data:` for the icons in Swagger UI's style sheet.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    # Not `no-referrer`: forms would then be sent with `Origin: null`.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
WORKER_TONES = {"running": "good", "finished": "done", "waiting": "busy", "stopped": "idle"}


def page(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """Render a page, or a fragment of one.

    Args:
        request: The request.
        template: File name in `templates/`.
        status: Status of the response.
        values: Variables of the template.
    """
    signed_in = context_of(request).auth.token is not None
    text = (
        templates()
        .get_template(template)
        .render(path=request.url.path, signed_in=signed_in, version=assets_version(), **values)
    )
    return HTMLResponse(text, status, HEADERS)


class PageRoute(APIRoute):
    """Route that renders errors as pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, wrapped so that its errors become pages."""
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except HTTPException as error:
                return error_page(request, error.status_code, str(error.detail))
            except RequestValidationError:
                return error_page(request, 404, "Page not found.")
            except XtokenError as error:
                return error_page(request, getattr(error, "status", 422), str(error))

        return handled


def error_page(request: Request, status: int, detail: str) -> HTMLResponse:
    """Render an error page."""
    return page(request, "error.html", status=status, title=HTTPStatus(status).phrase, detail=detail)


@cache
def templates() -> Environment:
    """Return the template environment: auto-escaping, and strict about undefined variables."""
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        "ago": formatting.ago,
        "span": span,
        "bytes": size,
        "number": formatting.number,
        "percent": formatting.percent,
        "count": formatting.count,
        "clock": formatting.clock,
        "code": formatting.code,
        "sentence": formatting.sentence,
    }
    environment.globals |= {"worker_tones": WORKER_TONES}
    return environment


@cache
def assets_version() -> str:
    """Return a hash of all static files, which is part of their URLs so that browsers do not use stale ones."""
    digest = hashlib.sha256()
    for path in sorted((HERE / "static").rglob("*")):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
