"""What readers see of a run: from the database, its supervisor's last words and its files, whoever asks how often.

No worker and no queue is asked, and nothing is made anew more than twice a second.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from services.common.resume import CHECKPOINTS, newest_checkpoint
from services.control.curves import Curve
from services.control.runs import Runs
from services.control.store import AttemptRow, RunRow
from services.supervisor.json_lines import read_json
from services.supervisor.run_record import SUMMARY, RunState

FRESH_S = 0.5
KEPT_VIEWS = 128
HIDDEN = ("seq", "spec", "queue", "key", "digest")

Value = TypeVar("Value")


class Fresh:
    """Values that are made anew when they are older than half a second, by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Any, tuple[float, Any]] = {}

    def get(self, key: Any, make: Callable[[], Value]) -> Value:
        """The value of a key, made by `make` if there is none fresh enough."""
        with self._lock:
            at, value = self._values.get(key, (0.0, None))
            if time.monotonic() - at > FRESH_S:
                value = make()
                self._values = {k: v for k, v in self._values.items() if time.monotonic() - v[0] <= FRESH_S}
                self._values[key] = (time.monotonic(), value)
            found: Value = value
            return found

    def peek(self, key: Any) -> Any:
        """The value of a key if there is one fresh enough, else None; never waits for anybody."""
        at, value = self._values.get(key, (0.0, None))
        return value if time.monotonic() - at <= FRESH_S else None

    def clear(self) -> None:
        """Nothing is fresh any more."""
        with self._lock:
            self._values = {}


class Pages:
    """Pages of the list as they were encoded, as long as nothing has been written since."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._version = -1
        self._pages: dict[Any, bytes] = {}

    def get(self, key: Any, version: int, make: Callable[[], bytes]) -> bytes:
        """A page, made by `make` if the database is not what it was.

        Args:
            key: Which page.
            version: Of the database, read before it is asked.
            make: Asks it.
        """
        with self._lock:
            if version != self._version or len(self._pages) > KEPT_VIEWS:
                self._version, self._pages = version, {}
            if key not in self._pages:
                self._pages[key] = make()
            return self._pages[key]

    def peek(self, key: Any, version: int) -> bytes | None:
        """A page if it is there as the database is; never waits for anybody."""
        pages = self._pages
        return pages.get(key) if version == self._version and pages is self._pages else None


class View:
    """One run, as readers see it.

    Attributes:
        steps: Its optimiser steps.
        eval: Its readings of the held-out text.
        fresh: What has been answered about it just now.
    """

    def __init__(self, runs: Runs, run_id: str, output: Path) -> None:
        self._runs, self.run_id, self.output = runs, run_id, output
        self.steps = Curve(output / "steps.jsonl")
        self.eval = Curve(output / "eval.jsonl")
        self.fresh = Fresh()

    def status(self) -> dict[str, Any] | None:
        """Where it stands: the fields of `GET /v1/runs/{id}`; None if it has been removed."""
        return self.fresh.get("status", self._status)

    def refresh(self, *, at_once: bool = False) -> None:
        """Read what its trainer has written since."""
        self.steps.refresh(at_once=at_once)
        self.eval.refresh(at_once=at_once)

    def _status(self) -> dict[str, Any] | None:
        row, run = self._runs.store.run(self.run_id), self._runs.get(self.run_id)
        if row is None:
            return None
        self.refresh()
        told = run.status() if run is not None else {}
        if not told.get("workers"):
            told["workers"] = workers_of(self._runs.store.attempts(self.run_id, life=row.life))
        state = RunState(told.get("state", row.state))
        return summary_of(row) | {name: value for name, value in told.items() if value is not None} | {
            "spec": row.spec,
            "last": self.steps.last,
            "evaluation": self.eval.last,
            "checkpoint": self._checkpoint(),
            "summary": read_json(self.output / SUMMARY) if state == RunState.COMPLETED else None,
        }  # fmt: skip

    def _checkpoint(self) -> int | None:
        newest = newest_checkpoint(self.output / CHECKPOINTS)
        return int(newest.name.removeprefix("step-")) if newest is not None else None


class Views:
    """The views of the runs that somebody has looked at of late."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._views: OrderedDict[str, View] = OrderedDict()
        self._lock = threading.Lock()

    def known(self, run_id: str) -> View | None:
        """The view of a run that somebody has looked at of late; asks nobody."""
        return self._views.get(run_id)

    def of(self, run_id: str) -> View | None:
        """The view of a run; None if there is no such run."""
        with self._lock:
            view = self._views.get(run_id)
            if view is not None:
                self._views.move_to_end(run_id)
                return view
        row = self._runs.store.run(run_id)
        if row is None:
            return None
        with self._lock:
            view = self._views.setdefault(run_id, View(self._runs, run_id, Path(row.output)))
            while len(self._views) > KEPT_VIEWS:
                self._views.popitem(last=False)
            return view

    def drop(self, run_id: str) -> None:
        """A run has been removed."""
        with self._lock:
            self._views.pop(run_id, None)


def summary_of(row: RunRow) -> dict[str, Any]:
    """A run's row, as a list shows it."""
    return {column.name: getattr(row, column.name) for column in RunRow.__table__.columns if column.name not in HIDDEN}


def workers_of(attempts: list[AttemptRow]) -> list[dict[str, Any]]:
    """The workers of a run that is over, by their last starts."""
    last = {attempt.worker: attempt for attempt in attempts}
    starts = {worker: sum(a.worker == worker for a in attempts) for worker in last}
    return [
        {
            "name": worker, "kind": start.kind, "state": "stopped", "pid": None, "incarnation": start.incarnation,
            "restarts": starts[worker] - 1, "exit_code": start.exit_code, "phase": "", "progress": 0,
            "heartbeat_age_s": None,
        }
        for worker, start in last.items()
    ]  # fmt: skip
