"""Error responses as `application/problem+json` (RFC 9457): one line in `detail`, field errors in `errors`."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from xtoken_core.config.validation_errors import field_of
from xtoken_core.errors import XtokenError

log = logging.getLogger("xtoken.control")

MEDIA_TYPE = "application/problem+json"
MAX_ERRORS = 50
"""Largest number of fields that a response names."""


class FieldError(BaseModel):
    """Error in one field of a request."""

    field: str
    message: str


class Problem(BaseModel):
    """Error response."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: list[FieldError] = []
    exit_code: int | None = None
    """Exit code of a command that fails with this error."""
    run: str | None = None
    """Id of the run that conflicts with the request."""


class ProblemResponse(JSONResponse):
    """JSON response with the media type of a problem."""

    media_type = MEDIA_TYPE

    def render(self, content: Any) -> bytes:
        """Return the content as JSON; half a surrogate pair of a request becomes a question mark."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


def problem(
    status: int,
    detail: str,
    *,
    errors: list[FieldError] | None = None,
    exit_code: int | None = None,
    run: str | None = None,
) -> ProblemResponse:
    """Return the response for an error."""
    body = Problem(
        title=HTTPStatus(status).phrase, status=status, detail=detail, errors=errors or [], exit_code=exit_code, run=run
    )
    return ProblemResponse(body.model_dump(), status_code=status)


def install(app: FastAPI) -> None:
    """Register the exception handlers that turn every error into a problem response."""

    async def invalid(_: Request, error: Exception) -> ProblemResponse:
        assert isinstance(error, RequestValidationError)
        items = error.errors()
        fields = [FieldError(field=_field(item), message=_message(item)) for item in items[:MAX_ERRORS]]
        detail = "; ".join(f"{field.field}: {field.message}" for field in fields)
        detail += f"; and {len(items) - MAX_ERRORS} more errors" if len(items) > MAX_ERRORS else ""
        return problem(422, detail, errors=fields, exit_code=2)

    async def expected(_: Request, error: Exception) -> ProblemResponse:
        field = getattr(error, "field", None)
        return problem(
            getattr(error, "status", 422),
            str(error),
            errors=[FieldError(field=field, message=getattr(error, "message", str(error)))] if field else None,
            exit_code=getattr(error, "exit_code", 1),
            run=getattr(error, "run_id", None),
        )

    async def refused(_: Request, error: Exception) -> ProblemResponse:
        assert isinstance(error, HTTPException)
        answer = problem(error.status_code, str(error.detail))
        answer.headers.update(error.headers or {})
        return answer

    async def incomplete(_: Request, __: Exception) -> ProblemResponse:
        return problem(400, "the request body is incomplete, or larger than accepted")

    async def unexpected(request: Request, error: Exception) -> ProblemResponse:
        log.error("%s %s", request.method, request.url.path, exc_info=error)
        return problem(500, "internal error: see the control plane's log")

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(XtokenError, expected)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(ClientDisconnect, incomplete)
    app.add_exception_handler(Exception, unexpected)


def _field(item: dict[str, Any]) -> str:
    path = item["loc"]
    return field_of(path[1:] if path[:1] == ("body",) else path) or "the run"


def _message(item: dict[str, Any]) -> str:
    return str(item["msg"]).removeprefix("Value error, ")
