"""JSON-lines files of a run: `steps.jsonl`, `eval.jsonl`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from xtoken_core.atomic import atomic_write
from xtoken_core.errors import OutputError


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
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                at = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):
                break
            if at < step or (inclusive and at == step):
                kept.append(line + "\n")
        replace_file(self.path, "".join(kept))

    def last_step(self) -> int | None:
        """Return the step of the last line; None without one."""
        if not self.path.exists():
            return None
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return int(json.loads(lines[-1])["step"]) if lines else None

    def append(self, row: dict[str, Any]) -> None:
        """Append a line and hand it to the operating system; numbers that are not finite become null.

        Raises:
            OutputError: It cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(plain(row), separators=(",", ":"), allow_nan=False) + "\n")
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror}") from error


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
    try:
        atomic_write(path, text)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
