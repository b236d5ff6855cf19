"""What a run writes down: `steps.jsonl`, `eval.jsonl`, `summary.json`."""

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

    def cut_back(self, step: int, *, inclusive: bool) -> None:
        """Drop the lines of later steps, and a torn last one: the run goes on from `step`.

        Args:
            step: Where the run goes on.
            inclusive: Whether a line of that very step stays.
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
        """The step of the last line."""
        if not self.path.exists():
            return None
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return int(json.loads(lines[-1])["step"]) if lines else None

    def append(self, row: dict[str, Any]) -> None:
        """Add a line and hand it to the system; numbers that are not finite become null.

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
    """A line as JSON can say it.

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
