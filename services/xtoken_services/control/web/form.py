"""Submitted forms."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qsl

from fastapi import Depends, HTTPException, Request

MAX_FIELDS = 2000


def parse_form(body: bytes) -> dict[str, str]:
    """Parse a form-encoded body.

    Raises:
        ValueError: The body is malformed, or has too many fields.
    """
    pairs = parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    return {name: value.replace("\r\n", "\n") for name, value in pairs}


async def _submitted(request: Request) -> dict[str, str]:
    try:
        return parse_form(await request.body())
    except ValueError as error:
        raise HTTPException(400, "Malformed form.") from error


Form = Annotated[dict[str, str], Depends(_submitted)]
"""Fields of the form in a request's body."""
