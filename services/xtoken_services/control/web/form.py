"""Submitted forms."""

from __future__ import annotations

from urllib.parse import parse_qsl

MAX_FIELDS = 2000


def parse_form(body: bytes) -> dict[str, str]:
    """Parse a form-encoded body.

    Raises:
        ValueError: The body is malformed, or has too many fields.
    """
    pairs = parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    return {name: value.replace("\r\n", "\n") for name, value in pairs}
