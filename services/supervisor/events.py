"""Events of a supervisor, for an observer that keeps them; the default one does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Attempt:
    """One start of one worker."""

    worker: str
    kind: str
    incarnation: int
    log: Path


class Journal:
    """Writes nothing: for a run that nobody shall take over. Others derive from it.

    Attributes:
        run_id: The run's name in the marks of its processes.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id

    def mark_of(self, worker: str, incarnation: int) -> str:
        """What the environment of one start of a worker says, and its children's."""
        return f"{self.run_id}/{worker}/{incarnation}/"

    def intend(self, attempts: Sequence[Attempt]) -> None:
        """These are about to be started."""

    def started(self, worker: str, incarnation: int, identity: dict[str, Any]) -> None:
        """A worker was started."""

    def ended(self, worker: str, incarnation: int, exit_code: int | None) -> None:
        """A worker has ended."""

    def counted(self, group: str, restarts: int, failures: int, highest_step: int) -> None:
        """A group's counts have changed."""

    def note(self, message: str, *, worker: str = "") -> None:
        """Something that a user would want to know has happened."""

    def run(self, **columns: Any) -> None:
        """Something about the run has changed."""
