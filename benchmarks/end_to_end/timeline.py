"""The time line of a run, read from its files while it runs: printed, and kept with its figures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SAYS = {"teacher loaded": ("teacher-0-0.*.log", " loaded from "), "ring open": ("trainer-0.*.log", " is open")}
"""Events by the log that has them, and the words that say so."""
EVERY = 5
"""Steps between two lines of the output."""
PARTS = ("data_wait", "teacher_wait", "forward_seconds", "loss_seconds", "backward_seconds")


class Timeline:
    """Reader of a run's output directory, in seconds since its command.

    Args:
        output: The run's output; it need not exist yet.
        console: What the command prints.
        say: Takes lines of text.

    Attributes:
        events: Seconds by event, in the order in which they were seen.
        rows: The records of the steps so far.
    """

    def __init__(self, output: Path, console: Path, say: Callable[[str], None]) -> None:
        self.events: dict[str, float] = {}
        self.rows: list[dict[str, Any]] = []
        self._output, self._console, self._say = output, console, say
        self._began = time.time()
        self._last = ""

    def poll(self) -> None:
        """Read what is new, and say it."""
        self._follow_console()
        if (self._output / "resolved.json").exists():
            self._note("files checked")
        for event, (name, words) in SAYS.items():
            if event not in self.events and any(words in _text(log) for log in self._output.glob(f"logs/{name}")):
                self._note(event)
        known = len(self.rows)
        self.rows = step_rows(self._output)
        for row in self.rows[known:]:
            self._step(row)

    def _follow_console(self) -> None:
        """Print what the run does before its first step; percentages alone are left out."""
        line = (_text(self._console).splitlines() or [""])[-1].partition(": ")[2]
        plain = "".join(letter for letter in line if not letter.isdigit())
        if plain != self._last and not self.rows:
            self._last = plain
            self._say(f"{time.time() - self._began:6.1f} s  {line}")

    def _note(self, event: str, at: float | None = None) -> None:
        if event not in self.events:
            self.events[event] = round((at or time.time()) - self._began, 2)
            self._say(f"{self.events[event]:6.1f} s  == {event}")

    def _step(self, row: dict[str, Any]) -> None:
        number = row["step"] + 1
        if number == 1:
            self._note("first step", row["time"])
        if number <= 2 or number % EVERY == 0:
            parts = ", ".join(f"{name} {row[name]:.3f}" for name in PARTS if name in row)
            self._say(f"{row['time'] - self._began:6.1f} s  step {number}: {row['seconds']:.3f} s ({parts})")


def step_rows(output: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's `steps.jsonl`, which another process may be writing."""
    return [json.loads(line) for line in _text(output / "steps.jsonl").splitlines(keepends=True) if line.endswith("\n")]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
