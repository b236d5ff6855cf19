"""Writer of a supervisor's events to the database, from which another control plane can recover the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from xtoken_services.common.run.status import RunState
from xtoken_services.control.store import AttemptRow, GroupRow, Store, StoreError, now
from xtoken_services.supervisor.events import Attempt, SupervisorEvents

log = logging.getLogger("xtoken.control")


class DatabaseEvents(SupervisorEvents):
    """Writer of one run's events; database write failures are logged and ignored, so that training continues.

    Args:
        store: The database.
        run_id: Id of the run.
        launch: Number of the run's current launch.
    """

    def __init__(self, store: Store, run_id: str, launch: int) -> None:
        self._store, self._run_id, self._launch = store, run_id, launch
        self._written: dict[str, Any] = {}

    def state_changed(self, state: RunState) -> None:
        """Update the run's state."""
        self._change(state=state)

    def progressed(self, step: int, steps: int) -> None:
        """Update the run's steps."""
        self._change(step=step, steps=steps)

    def queues_assigned(self, queues: dict[str, Any]) -> None:
        """Store the addresses of the run's queues."""
        self._change(queue=queues)

    def starting(self, attempts: Sequence[Attempt]) -> None:
        """Insert a row for each attempt, without an identity yet."""
        of = {"run_id": self._run_id, "launch": self._launch, "started": now()}
        rows = [AttemptRow(**of, **asdict(attempt) | {"log": str(attempt.log)}) for attempt in attempts]
        self._write(lambda: self._store.add_attempts(rows))

    def started(self, worker: str, incarnation: int, identity: dict[str, Any]) -> None:
        """Store the identity of the attempt's process."""
        self._write(lambda: self._store.change_attempt(self._run_id, worker, incarnation, identity=identity))

    def exited(self, worker: str, incarnation: int, exit_code: int | None) -> None:
        """Store the time and status of the attempt's exit."""
        end = {"ended": now(), "exit_code": exit_code}
        self._write(lambda: self._store.change_attempt(self._run_id, worker, incarnation, **end))

    def failures_counted(self, group: str, restarts: int, failures: int, highest_step: int) -> None:
        """Replace the group's row."""
        row = GroupRow(run_id=self._run_id, name=group, restarts=restarts, failures=failures, highest_step=highest_step)
        self._write(lambda: self._store.set_group(row))

    def message(self, text: str, *, worker: str = "") -> None:
        """Insert a note."""
        self._write(lambda: self._store.add_note(self._run_id, text, worker=worker))

    def ended(self, state: RunState, error: str, exit_code: int) -> None:
        """Store how the run ended, as columns and as a note."""
        self._change(state=state, error=error, exit_code=exit_code, ended=now())
        self.message(f"{state}: {error}" if error else state)

    def _change(self, **columns: Any) -> None:
        """Update the columns that differ from what was written last."""
        new = {k: v for k, v in columns.items() if k not in self._written or self._written[k] != v}
        if new and self._write(lambda: self._store.change(self._run_id, **new)):
            self._written |= new

    def _write(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except StoreError as error:
            log.error("run %s: %s", self._run_id, error)
            return False
        return True
