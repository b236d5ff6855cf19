"""Pages from templates: their environment, how figures are written, and the headers that every page carries."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from services.control.api.dependencies import context_of
from services.supervisor.run_record import RunState
from xtoken_core.errors import XtokenError

HERE = Path(__file__).parent
HEADERS = {
    # `data:` for the icons in Swagger UI's style sheet.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    # Not `no-referrer`: forms would then be sent with `Origin: null`.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
TONES = {
    RunState.STARTING: "busy",
    RunState.RUNNING: "good",
    RunState.STOPPING: "busy",
    RunState.COMPLETED: "done",
    RunState.FAILED: "bad",
    RunState.STOPPED: "idle",
    RunState.INTERRUPTED: "warn",
}
WORKER_TONES = {"running": "good", "finished": "done", "waiting": "busy", "stopped": "idle"}


def page(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """A page, or a fragment of one.

    Args:
        request: Who asks.
        template: Its file in `templates/`.
        status: The answer's status.
        values: What the template names.
    """
    signed_in = context_of(request).auth.token is not None
    text = templates().get_template(template).render(
        path=request.url.path, signed_in=signed_in, version=assets_version(), **values
    )  # fmt: skip
    return HTMLResponse(text, status, HEADERS)


class PageRoute(APIRoute):
    """A route whose errors are pages too."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, and what becomes of its errors."""
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except HTTPException as error:
                return failure(request, error.status_code, str(error.detail))
            except RequestValidationError:
                return failure(request, 404, "There is no such page.")
            except XtokenError as error:
                return failure(request, getattr(error, "status", 422), str(error))

        return handled


def failure(request: Request, status: int, detail: str) -> HTMLResponse:
    """A page that says what has gone wrong."""
    return page(request, "error.html", status=status, title=HTTPStatus(status).phrase, detail=detail)


@cache
def templates() -> Environment:
    """The templates, escaped, strict about names."""
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, auto_reload=False,
    )  # fmt: skip
    environment.filters |= {
        "ago": ago, "span": span, "bytes": size, "figure": figure, "percent": percent, "count": count, "clock": clock,
        "code": code,
    }  # fmt: skip
    environment.globals |= {"tones": TONES, "worker_tones": WORKER_TONES}
    return environment


@cache
def assets_version() -> str:
    """A name for what `static/` holds, so that a browser keeps no older file."""
    digest = hashlib.sha256()
    for path in sorted((HERE / "static").rglob("*")):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def code(text: str) -> Markup:
    """A text whose words in backticks are code.

    >>> code("`a` < b")
    Markup('<code>a</code> &lt; b')
    """
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def seconds_since(stamp: str) -> float:
    """Seconds since a time as the database writes it."""
    return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds())


def ago(stamp: str | None) -> str:
    """How long ago a time was.

    >>> ago(None)
    '–'
    """
    if not stamp:
        return "–"
    seconds = seconds_since(stamp)
    return "just now" if seconds < 10 else f"{span(seconds)} ago"


def clock(stamp: str | None) -> str:
    """A time for a tooltip.

    >>> clock("2026-01-02T03:04:05.678+00:00")
    '2026-01-02 03:04:05 UTC'
    """
    return f"{stamp[:19].replace('T', ' ')} UTC" if stamp else ""


def span(seconds: float | None) -> str:
    """A duration by its two largest units.

    >>> [span(s) for s in (0.4, 42, 61, 3700, 200_000, None)]
    ['0 s', '42 s', '1 min 1 s', '1 h 1 min', '2 d 7 h', '–']
    """
    if seconds is None:
        return "–"
    whole = int(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    first = next((i for i, (value, _) in enumerate(parts) if value), 3)
    shown = [f"{value} {unit}" for value, unit in parts[first : first + 2] if value]
    return " ".join(shown) or "0 s"


def size(value: float | None) -> str:
    """Bytes by their binary unit.

    >>> [size(b) for b in (0, 1023, 1536, 5 * 2**30, None)]
    ['0 B', '1023 B', '1.5 KiB', '5.0 GiB', '–']
    """
    if value is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def figure(value: float | None) -> str:
    """A figure by four digits that count.

    >>> [figure(v) for v in (None, 0, 5.867766, 2310.946, 0.00015044)]
    ['–', '0', '5.868', '2,311', '0.0001504']
    """
    if value is None:
        return "–"
    if value and abs(value) < 1e-4:
        return f"{value:.2e}"
    return f"{value:,.0f}" if value == 0 or abs(value) >= 1000 else f"{value:.4g}"


def percent(value: float | None) -> str:
    """A share.

    >>> [percent(v) for v in (None, 0.0213)]
    ['–', '2.1 %']
    """
    return "–" if value is None else f"{value * 100:.1f} %"


def count(value: int | None) -> str:
    """A whole number, its thousands apart.

    >>> [count(v) for v in (None, 12345)]
    ['–', '12,345']
    """
    return "–" if value is None else f"{value:,}"
