"""Read-only views of runs, made from the database, the supervisor's last status and the run's files.

Reading sends no request to a worker or a queue.
"""

from __future__ import annotations

import math
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from xtoken_core.config.resolved import ResolvedRun
from xtoken_services.common.run.resume import RESOLVED
from xtoken_services.common.run.status import RunState, RunStatus, WorkerStatus
from xtoken_services.control.runs import Runs
from xtoken_services.control.store import AttemptRow
from xtoken_services.supervisor.json_files import read_json
from xtoken_services.supervisor.run_files import Curve, with_files

KEPT_VIEWS = 128
POLL_S = 0.5
MAX_COLUMNS = 256
MAX_INTEGER = 2**1000
"""Larger integers do not fit a float."""


class View:
    """Read-only view of one run.

    Attributes:
        steps: Metrics of the optimiser steps.
        eval: Metrics of the evaluations.
    """

    def __init__(self, runs: Runs, run_id: str, output: Path) -> None:
        self._runs, self.run_id, self.output = runs, run_id, output
        self.steps = MetricLog(output / "steps.jsonl")
        self.eval = MetricLog(output / "eval.jsonl")
        self._same_tokenizer: tuple[bool, ...] = ()

    def refresh(self) -> None:
        """Read the lines that the trainer has added to both curves."""
        self.steps.refresh()
        self.eval.refresh()

    @property
    def same_tokenizer(self) -> tuple[bool, ...]:
        """Per teacher, True if it has the student's tokenizer; empty before the run's files are validated."""
        if not self._same_tokenizer:
            with suppress(ValueError):  # another process may have written anything
                resolved = ResolvedRun.model_validate(read_json(self.output / RESOLVED) or {})
                self._same_tokenizer = resolved.same_tokenizer
        return self._same_tokenizer

    def status(self) -> RunStatus | None:
        """Return the status of the run, or None if it has been removed."""
        row, run = self._runs.store.run(self.run_id), self._runs.get(self.run_id)
        if row is None:
            return None
        self.refresh()
        status = row.status() if run is None else run.status()
        workers = status.workers or workers_of(self._runs.store.attempts(self.run_id, launch=row.launch))
        status = status.model_copy(update={"ended": row.ended, "workers": workers, "description": row.description})
        return with_files(status, self.steps, self.eval)

    def is_over(self) -> bool:
        """Return True if the run is over or has been removed; unlike `status`, it reads no file."""
        run = self._runs.get(self.run_id)
        if run is not None:
            return run.over.is_set()
        row = self._runs.store.run(self.run_id)
        return row is None or RunState(row.state).over


class Views:
    """Cache of views, so that metric files are read incrementally; holds the most recently used."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._views: OrderedDict[str, View] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, run_id: str) -> View | None:
        """Return the view of a run, or None if there is no such run."""
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

    def status(self, run_id: str) -> RunStatus | None:
        """Return the status of a run, or None if there is no such run."""
        view = self.of(run_id)
        return view.status() if view is not None else None

    def drop(self, run_id: str) -> None:
        """Discard the view of a removed run."""
        with self._lock:
            self._views.pop(run_id, None)


def workers_of(attempts: list[AttemptRow]) -> list[WorkerStatus]:
    """Return the workers of a run without a supervisor, from the last attempt of each."""
    last = {attempt.worker: attempt for attempt in attempts}
    starts = {worker: sum(a.worker == worker for a in attempts) for worker in last}
    return [
        WorkerStatus(
            name=worker,
            kind=start.kind,
            state="stopped",
            pid=None,
            incarnation=start.incarnation,
            restarts=starts[worker] - 1,
            exit_code=start.exit_code,
            phase="",
            progress=0,
            heartbeat_age_s=None,
        )
        for worker, start in last.items()
    ]


class MetricLog(Curve):
    """A curve of which every metric is kept as a column.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, POLL_S)

    def _reset(self) -> None:
        super()._reset()
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self._whole: set[str] = set()

    def __len__(self) -> int:
        return len(self._steps)

    def sample(self, after: int, points: int) -> list[dict[str, Any]]:
        """Return the lines after a step, averaged over equal intervals if there are more than `points`.

        Args:
            after: Only steps greater than this.
            points: Largest number of rows.

        Returns:
            One row per interval: the mean of every metric, and the `step` of the interval's last line. Missing and
            non-finite values are left out.
        """
        with self._lock:
            first = bisect_right(self._steps, after)
            count = len(self._steps) - first
            bounds = first + np.unique(np.linspace(0, count, min(points, count) + 1).astype(np.int64))
            starts, ends = bounds[:-1], bounds[1:]
            rows = [{"step": self._steps[end - 1]} for end in ends]
            for name, column in self._columns.items():
                values = np.frombuffer(column, dtype=np.float64)
                _fill(rows, name, values, starts, ends, whole=name in self._whole and count <= points)
                del values  # an array cannot grow while a buffer of it is exported
        return rows

    def _add(self, raw: bytes) -> dict[str, Any] | None:
        """See `Curve`."""
        line = super()._add(raw)
        if line is None:
            return None
        numbers = {k: v for k, v in line.items() if _is_number(v)}
        for name in numbers.keys() - self._columns.keys() - {"step"}:
            if len(self._columns) < MAX_COLUMNS:
                self._columns[name] = array("d", [math.nan]) * len(self._steps)
                self._whole.add(name)
        self._steps.append(line["step"])
        for name, column in self._columns.items():
            value = numbers.get(name)
            column.append(math.nan if value is None else float(value))
            if isinstance(value, float):
                self._whole.discard(name)
        return line


def _fill(rows: list[dict[str, Any]], name: str, values: Any, starts: Any, ends: Any, *, whole: bool) -> None:
    """Write the mean of each interval of a column into the rows."""
    if not rows:
        return
    finite = np.isfinite(values[: ends[-1]])
    sums = np.add.reduceat(np.where(finite, values[: ends[-1]], 0.0), starts)
    counts = np.add.reduceat(finite.astype(np.int64), starts)
    for row, total, count in zip(rows, sums.tolist(), counts.tolist(), strict=True):
        if count:
            row[name] = int(total) if whole else total / count


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < MAX_INTEGER)
