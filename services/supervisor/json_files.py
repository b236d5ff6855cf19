"""Readers of JSON files that other processes write meanwhile."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

TAIL_BYTES = 1 << 16
ID_LISTS = ("ids", "skipped", "dead")


def last_line(path: Path) -> dict[str, Any] | None:
    """Return the last complete line of a JSON lines file, without its lists of sample ids; None if there is none.

    Numbers that are not finite become None, as in JSON.
    """
    try:
        with path.open("rb") as file:
            size, wanted = path.stat().st_size, TAIL_BYTES
            while True:
                file.seek(max(0, size - wanted))
                complete = file.read(size).split(b"\n")[:-1]
                # The first piece may be the end of a longer line, so one piece alone counts only from the beginning.
                if complete and (len(complete) > 1 or wanted >= size):
                    line = _parse_object(complete[-1])
                    return line and {k: _finite(v) for k, v in line.items() if k not in ID_LISTS}
                if wanted >= size:
                    return None
                wanted *= 4
    except OSError:
        return None


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is none."""
    try:
        return _parse_object(path.read_bytes())
    except OSError:
        return None


def _parse_object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
