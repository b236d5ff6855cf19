"""Metrics of a run as columns, from which intervals are averaged."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np

from xtoken_services.supervisor.run_files import Curve

POLL_S = 0.5
MAX_COLUMNS = 256
MAX_INTEGER = 2**1000
"""Larger integers do not fit a float."""


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
