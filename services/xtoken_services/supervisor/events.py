"""Events of a supervised run, and the observer that receives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xtoken_services.common.run.status import RunState


@dataclass(frozen=True)
class Attempt:
    """One start of one worker."""

    worker: str
    kind: str
    incarnation: int
    log: Path


class SupervisorEvents:
    """Observer of one run's supervisor; every method does nothing, so a subclass overrides only what it records.

    All methods are called from the run's thread, except `state_changed`, which `stop` may call from any thread. They
    must not raise: training continues whether or not an event can be recorded.
    """

    def state_changed(self, state: RunState) -> None:
        """Receive the run's state; called again while it stays the same."""

    def progressed(self, step: int, steps: int) -> None:
        """Receive the number of optimiser steps taken and planned; called again while they stay the same."""

    def queues_assigned(self, queues: dict[str, Any]) -> None:
        """Receive the addresses of the run's queues, see `QueueDirectory.to_document`."""

    def starting(self, attempts: Sequence[Attempt]) -> None:
        """Receive the attempts that are about to start; called before any of their processes exists."""

    def started(self, worker: str, incarnation: int, identity: dict[str, Any]) -> None:
        """Receive the identity by which a launcher recognises a started process."""

    def exited(self, worker: str, incarnation: int, exit_code: int | None) -> None:
        """Receive a worker's exit status."""

    def failures_counted(self, group: str, restarts: int, failures: int, highest_step: int) -> None:
        """Receive a process group's restart counters."""

    def message(self, text: str, *, worker: str = "") -> None:
        """Receive one line for the user."""

    def ended(self, state: RunState, error: str, exit_code: int) -> None:
        """Receive how the run ended; nothing follows."""
