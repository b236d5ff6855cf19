"""Readers of JSON files that other processes write meanwhile, in a run's directory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from xtoken_core.regular_files import MIB, parse_object, read_below

MAX_LINE_BYTES = 32 * MIB
"""Longest line that is read: one with the ids of a step of a million samples has about 10 MiB."""
MAX_FILE_BYTES = 16 * MIB
MAX_DEPTH = 32
"""Deepest nesting that is accepted: the value is serialized again by code that recurses."""
MAX_TEXT = 4096
ID_LISTS = ("ids", "skipped", "dead")


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """Return the scalars of a line of metrics: numbers, those that are not finite as None, and short texts.

    Lists of sample ids are left out; None is returned for what is no JSON object.
    """
    line = parse_document(raw)
    return None if line is None else {k: v for k, v in map(_scalar, line.items()) if k not in ID_LISTS}


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file of a run's directory; None if there is none, or it is too large."""
    try:
        return parse_document(read_below(path.parent, path.name, MAX_FILE_BYTES))
    except OSError:
        return None


def parse_document(raw: bytes) -> dict[str, Any] | None:
    """Return a JSON object that can be serialized again: of bounded depth, without halves of surrogate pairs."""
    try:
        value = parse_object(raw)
    except ValueError:
        return None
    return value if _serializable(value) else None


def _serializable(document: dict[str, Any]) -> bool:
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += [*value.keys(), *value.values()]
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str) and not value.isascii() and not encodable(value):
                return False
        if not below:
            return True
        level = below
    return False


def encodable(text: str) -> bool:
    """Return whether a text is UTF-8, as a response must be: a name of a file may have other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _scalar(item: tuple[str, Any]) -> tuple[str, Any]:
    name, value = item
    if isinstance(value, float) and not math.isfinite(value):
        return name, None
    return name, value[:MAX_TEXT] if isinstance(value, str) else value
