"""Errors as `application/problem+json` (RFC 9457): one line in `detail`, and the fields it is about in `errors`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from xtoken_core.errors import XtokenError

MEDIA_TYPE = "application/problem+json"


class FieldError(BaseModel):
    """What is wrong with one field of a request."""

    field: str
    message: str


class Problem(BaseModel):
    """An error."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: list[FieldError] = []
    exit_code: int | None = None
    """What a command that meets this error exits with."""


class ProblemResponse(JSONResponse):
    """A response with a problem's media type."""

    media_type = MEDIA_TYPE


def problem(
    status: int, detail: str, *, errors: list[FieldError] | None = None, exit_code: int | None = None
) -> ProblemResponse:
    """The response for an error."""
    found = Problem(
        title=HTTPStatus(status).phrase, status=status, detail=detail, errors=errors or [], exit_code=exit_code
    )
    return ProblemResponse(found.model_dump(), status_code=status)


def install(app: FastAPI) -> None:
    """Make an application answer every error as a problem."""

    async def invalid(_: Request, error: Exception) -> ProblemResponse:
        assert isinstance(error, RequestValidationError)
        fields = [FieldError(field=_field(item), message=_message(item)) for item in error.errors()]
        detail = "; ".join(f"{field.field}: {field.message}" for field in fields)
        return problem(422, detail, errors=fields, exit_code=2)

    async def expected(_: Request, error: Exception) -> ProblemResponse:
        return problem(getattr(error, "status", 422), str(error), exit_code=getattr(error, "exit_code", 1))

    async def refused(_: Request, error: Exception) -> ProblemResponse:
        assert isinstance(error, HTTPException)
        return problem(error.status_code, str(error.detail))

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(XtokenError, expected)
    app.add_exception_handler(HTTPException, refused)


def _field(item: dict[str, Any]) -> str:
    parts = [str(part) for part in item["loc"]]
    return ".".join(parts[1:] if parts[:1] == ["body"] else parts) or "the run"


def _message(item: dict[str, Any]) -> str:
    return str(item["msg"]).removeprefix("Value error, ")
