"""Reading the JSON lines that a trainer writes, while it writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TAIL_BYTES = 1 << 16
LISTS_OF_IDS = ("ids", "skipped", "dead")


def last_line_of(path: Path) -> dict[str, Any] | None:
    """The last whole line, without its lists of sample ids; None if there is none."""
    try:
        with path.open("rb") as file:
            size, wanted = path.stat().st_size, TAIL_BYTES
            while True:
                file.seek(max(0, size - wanted))
                whole = file.read(size).split(b"\n")[:-1]
                if whole and (len(whole) > 1 or wanted >= size):
                    return _plain(whole[-1])
                if wanted >= size:
                    return None
                wanted *= 4
    except OSError:
        return None


def lines_after(path: Path, step: int, limit: int) -> list[dict[str, Any]]:
    """Up to `limit` lines of steps beyond `step`, in the file's order, without their lists of sample ids."""
    found: list[dict[str, Any]] = []
    for line in _lines(path):
        if line.get("step", -1) > step:
            found.append(line)
            if len(found) == limit:
                break
    return found


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object in a file; None if there is none."""
    try:
        return _object(path.read_bytes())
    except OSError:
        return None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            for raw in file:
                line = _plain(raw) if raw.endswith(b"\n") else None
                if line is not None:
                    yield line
    except OSError:
        return


def _plain(raw: bytes) -> dict[str, Any] | None:
    line = _object(raw)
    return None if line is None else {name: value for name, value in line.items() if name not in LISTS_OF_IDS}


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(raw)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
