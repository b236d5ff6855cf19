"""Metrics of a run: a growing file of JSON lines, read incrementally and kept as columns."""

from __future__ import annotations

import math
import os
import threading
import time
from array import array
from bisect import bisect_right
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from xtoken_core.regular_files import open_below
from xtoken_services.common.run.status import is_better
from xtoken_services.supervisor.json_files import MAX_LINE_BYTES, parse_line

POLL_S = 0.5
RECENT = 20
MAX_COLUMNS = 256
CHUNK_BYTES = 1 << 22
MAX_PASSED_BYTES = 1 << 28
"""Bytes of a line beyond `MAX_LINE_BYTES` that one refresh passes over; the next one continues behind them."""
MAX_STEP = 2**62
MAX_INTEGER = 2**1000
"""Larger integers do not fit a float."""


class MetricLog:
    """A file of JSON lines with a `step` each, in order.

    A resumed run truncates its file to the checkpoint's step; the file is then read again from the beginning.

    Attributes:
        first: The first line, without lists of sample ids; None if the file is empty.
        best: The line with the fewest bits per byte after step 0 likewise, where lines are evaluations.
        recent: The last lines likewise.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._read_at = -math.inf
        self._reset()

    def _reset(self) -> None:
        self._offset, self._inode = 0, 0
        self._in_long_line = False
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self._whole: set[str] = set()
        self.first: dict[str, Any] | None = None
        self.best: dict[str, Any] | None = None
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)

    @property
    def last(self) -> dict[str, Any] | None:
        """The last line, or None if the file is empty."""
        return self.recent[-1] if self.recent else None

    def __len__(self) -> int:
        return len(self._steps)

    def refresh(self) -> None:
        """Read the lines added since the last call; does nothing within half a second of it.

        A line that is too long is passed over in bounded parts, one per call, so that no reader waits for all of it.
        """
        with self._lock:
            if time.monotonic() - self._read_at < POLL_S:
                return
            try:
                self._read()
            except OSError:
                if self._offset:
                    self._reset()
            self._read_at = time.monotonic()

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

    def _read(self) -> None:
        with os.fdopen(open_below(self._path.parent, self._path.name), "rb") as file:
            status = os.fstat(file.fileno())
            if self._offset and (status.st_ino != self._inode or status.st_size < self._offset):
                self._reset()
            self._inode = status.st_ino
            file.seek(self._offset)
            pieces: list[bytes] = []  # of the line that has no end yet
            passed = 0
            while passed < MAX_PASSED_BYTES and (chunk := file.read(CHUNK_BYTES)):
                *lines, rest = chunk.split(b"\n")
                for line in lines:
                    whole = b"".join((*pieces, line))
                    pieces.clear()
                    if not self._in_long_line:
                        self._add(whole)
                    self._in_long_line = False
                    self._offset += len(whole) + 1
                pieces.append(rest)
                length = sum(map(len, pieces))
                if self._in_long_line or length > MAX_LINE_BYTES:  # no trainer writes such a line: it is passed over
                    self._in_long_line = True
                    self._offset += length
                    passed += length
                    pieces.clear()

    def _add(self, raw: bytes) -> None:
        line = parse_line(raw)
        if line is None or type(line.get("step")) is not int or not 0 <= line["step"] <= MAX_STEP:
            return
        if self._steps and line["step"] < self._steps[-1]:
            return
        self.first = self.first or line
        self.best = line if is_better(line, self.best) else self.best
        self.recent.append(line)
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
