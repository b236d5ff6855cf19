"""JSON-lines files of a run: `steps.jsonl`, `eval.jsonl`."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xtoken_core.atomic import atomic_write
from xtoken_core.errors import OutputError, os_errors_as


class JsonLines:
    """A file of one JSON object per line, each with a `step`, written line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def truncate(self, step: int, *, inclusive: bool) -> None:
        """Drop the lines of later steps, and a torn last one, before the run resumes.

        Args:
            step: Step at which the run resumes.
            inclusive: Keep a line of that very step.
        """
        if not self.path.exists():
            return
        replace_file(self.path, "".join(map(_text, lines_before_step(self.path, step + inclusive))))

    def last_step(self) -> int | None:
        """Return the step of the last line; None without one."""
        return last_line(self.path).get("step")

    def append(self, row: dict[str, Any]) -> None:
        """Append a line and hand it to the operating system; numbers that are not finite become null.

        Raises:
            OutputError: It cannot be written.
        """
        with os_errors_as(OutputError, f"cannot write {self.path}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_text(row))


def lines_before_step(path: Path, step: float) -> Iterator[dict[str, Any]]:
    """Yield the lines of earlier steps, in order; a file that is still written may end in a torn line."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                row = json.loads(line)
                if row["step"] >= step:
                    return
            except (ValueError, KeyError, TypeError):
                return
            yield row


def last_line(path: Path) -> dict[str, Any]:
    """Return the last line of a file; empty without one."""
    return next(iter(deque(lines_before_step(path, math.inf), maxlen=1)), {})


def _text(row: dict[str, Any]) -> str:
    return json.dumps(plain(row), separators=(",", ":"), allow_nan=False) + "\n"


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a line with null for numbers that JSON does not have.

    >>> plain({"loss": float("nan"), "step": 1})
    {'loss': None, 'step': 1}
    """
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        OutputError: It cannot be written; what was there stays.
    """
    with os_errors_as(OutputError, f"cannot write {path}"):
        atomic_write(path, text)
