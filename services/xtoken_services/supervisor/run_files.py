"""Readers of what a run's trainer writes, while it grows: curves as JSON lines, checkpoints, the summary."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from xtoken_core.errors import InputError
from xtoken_core.regular_files import open_below
from xtoken_services.common.run.metric_lines import SAMPLE, finite, is_better
from xtoken_services.common.run.resume import CHECKPOINTS, checkpoints_in
from xtoken_services.common.run.status import RunState, RunStatus, goes_by_tasks
from xtoken_services.supervisor.json_files import MAX_LINE_BYTES, parse_line, read_json
from xtoken_services.supervisor.run_record import SUMMARY

RECENT = 20
ALARM_STEPS = 8
"""Steps with completions whose means are compared: the first ones with the last ones."""
ALARMS = ("entropy", "finished", "completion_tokens", "overlap_ratio")
"""Their metrics by which completions that run away are found."""
CHUNK_BYTES = 1 << 22
MAX_PASSED_BYTES = 1 << 28
"""Bytes of a line beyond `MAX_LINE_BYTES` that one refresh passes over; the next one continues behind them."""
MAX_STEP = 2**62


class Curve:
    """A file of JSON lines with a `step` each, in order.

    A resumed run truncates its file to the checkpoint's step; the file is then read again from the beginning.

    Attributes:
        first: The first line, without lists of sample ids; None if the file is empty.
        generated: The first lines with completions likewise, where lines are steps.
        recent: The last lines likewise.

    Args:
        path: The file.
        poll_s: Seconds for which a refresh counts: one that follows within them does nothing.
    """

    def __init__(self, path: Path, poll_s: float = 0.0) -> None:
        self._path, self._poll_s = path, poll_s
        self._lock = threading.Lock()
        self._read_at = -math.inf
        self._reset()

    def _reset(self) -> None:
        self._offset, self._inode = 0, 0
        self._in_long_line = False
        self.first: dict[str, Any] | None = None
        self.generated: list[dict[str, Any]] = []
        self._best: dict[bool, dict[str, Any] | None] = {False: None, True: None}
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)

    @property
    def last(self) -> dict[str, Any] | None:
        """The last line, or None if the file is empty."""
        return self.recent[-1] if self.recent else None

    def best(self, spec: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return the best line by a run's settings, where lines are evaluations."""
        return self._best[goes_by_tasks(spec)]

    def evaluations(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Return the first, the last and the best line as fields of `RunStatus`, where lines are evaluations."""
        self.refresh()
        return {"evaluation": self.last, "first_evaluation": self.first, "best_evaluation": self.best(spec)}

    def steps(self) -> dict[str, Any]:
        """Return the last line and the means of completions as fields of `RunStatus`, where lines are steps."""
        self.refresh()
        with self._lock:
            recent = [line for line in self.recent if "completions" in line][-ALARM_STEPS:]
        full = len(self.generated) == len(recent) == ALARM_STEPS
        means = {"first": _means(self.generated), "last": _means(recent)} if full else None
        return {"last": self.last, "completions": means}

    def refresh(self) -> None:
        """Read the lines added since the last call; does nothing within `poll_s` of it.

        A line that is too long is passed over in bounded parts, one per call, so that no reader waits for all of it.
        """
        with self._lock:
            if time.monotonic() - self._read_at < self._poll_s:
                return
            try:
                self._read()
            except OSError:
                if self._offset:
                    self._reset()
            self._read_at = time.monotonic()

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

    def _add(self, raw: bytes) -> dict[str, Any] | None:
        """Take a line in and return it; None for what no trainer writes."""
        line = parse_line(raw)
        if line is None or type(line.get("step")) is not int or not 0 <= line["step"] <= MAX_STEP:
            return None
        if self.last is not None and line["step"] < self.last["step"]:
            return None
        self.first = self.first or line
        for by_tasks, best in self._best.items():
            self._best[by_tasks] = line if is_better(line, best, by_tasks=by_tasks) else best
        if "completions" in line and len(self.generated) < ALARM_STEPS:
            self.generated.append(line)
        self.recent.append(line)
        return line


def _means(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the means of the `ALARMS` that all lines have."""
    rows = [finite(line) for line in lines]
    names = [name for name in ALARMS if all(name in row for row in rows)]
    return {name: math.fsum(row[name] for row in rows) / len(rows) for name in names}


def with_files(status: RunStatus, steps: Curve, evaluations: Curve) -> RunStatus:
    """Return a run's status with what its files say.

    Args:
        status: The status as its supervisor knows it.
        steps: Its `steps.jsonl`.
        evaluations: Its `eval.jsonl`.
    """
    checkpoint = None
    with suppress(InputError):
        checkpoint = max(checkpoints_in(status.output / CHECKPOINTS), default=None)
    summary = read_json(status.output / SUMMARY) if status.state == RunState.COMPLETED else None
    taken = steps.steps()
    # The file has a step before the supervisor hears of it; until a trainer trains it may be of an earlier start.
    trains = any(worker.kind == "trainer" and worker.phase == "run" for worker in status.workers)
    step = max(status.step or 0, taken["last"]["step"] + 1) if trains and taken["last"] else status.step
    files = {"step": step, "checkpoint": checkpoint, "summary": summary, "sample": read_json(status.output / SAMPLE)}
    return status.model_copy(update=files | taken | evaluations.evaluations(status.spec))
