"""Writes a supervisor's events into the database, so that another supervisor can take over at any moment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from services.control.store import AttemptRow, GroupRow, Store, StoreError, now
from services.supervisor.events import Attempt, Journal
from services.supervisor.run_record import RunState

log = logging.getLogger("xtoken.control")


class DatabaseJournal(Journal):
    """Writes into the control plane's database. What cannot be written is logged: training goes on without its diary.

    Args:
        life: Which start of the run this is.
    """

    def __init__(self, store: Store, run_id: str, life: int) -> None:
        super().__init__(run_id)
        self._store, self._life = store, life
        self._told: dict[str, Any] = {}

    def intend(self, attempts: Sequence[Attempt]) -> None:
        """A row each, without an identity yet."""
        rows = [
            AttemptRow(
                run_id=self.run_id, life=self._life, worker=a.worker, kind=a.kind, incarnation=a.incarnation,
                log=str(a.log), started=now(),
            )
            for a in attempts
        ]  # fmt: skip
        self._try(lambda: self._store.intend(rows))

    def started(self, worker: str, incarnation: int, identity: dict[str, Any]) -> None:
        """Its row gets the identity."""
        self._try(lambda: self._store.attempt(self.run_id, worker, incarnation, identity=identity))

    def ended(self, worker: str, incarnation: int, exit_code: int | None) -> None:
        """Its row gets the time and the status."""
        self._try(lambda: self._store.attempt(self.run_id, worker, incarnation, ended=now(), exit_code=exit_code))

    def counted(self, group: str, restarts: int, failures: int, highest_step: int) -> None:
        """The group's row is renewed."""
        row = GroupRow(
            run_id=self.run_id, name=group, restarts=restarts, failures=failures, highest_step=highest_step
        )  # fmt: skip
        self._try(lambda: self._store.set_group(row))

    def note(self, message: str, *, worker: str = "") -> None:
        """A row."""
        self._try(lambda: self._store.note(self.run_id, message, worker=worker))

    def run(self, **columns: Any) -> None:
        """The columns that are not what they were."""
        news = {name: value for name, value in columns.items() if name not in self._told or self._told[name] != value}
        if news and self._try(lambda: self._store.change(self.run_id, **news)):
            self._told |= news

    def _try(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except StoreError as error:
            log.error("run %s: %s", self.run_id, error)
            return False
        return True


def over_columns(state: RunState, error: str, exit_code: int | None) -> dict[str, Any]:
    """What is set of a run that has ended."""
    return {"state": state, "error": error, "exit_code": exit_code, "ended": now()}
