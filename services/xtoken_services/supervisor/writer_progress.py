"""Progress of the writers of a store, by the files that they write: a build has no queue."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from xtoken_services.common.stores import SIGN_OF_LIFE

LINES = "steps.jsonl"


class WriterProgress:
    """Steps of one start of a build.

    Args:
        output: Directory of the build.
        left: Steps that each rank has to do.

    Attributes:
        steps: Steps of all ranks.
    """

    def __init__(self, output: Path, left: Mapping[int, int]) -> None:
        self._path, self._left = output / LINES, dict(left)
        self.steps = sum(left.values())
        self._running: set[str] = set()
        self._alive_at: dict[str, float] = {}
        self._signs: dict[int, str] = {}
        self._read = 0
        with suppress(FileNotFoundError):  # lines of earlier starts are passed over
            self._read = self._path.stat().st_size

    def steps_done(self) -> int:
        """Read what was added, and return the steps that are done: a line says how many are left to its rank."""
        for rank in self._left:
            self._look_for_sign(rank)
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._read)
            for line in itertools.takewhile(lambda line: line.endswith(b"\n"), file):
                self._read += len(line)
                row = json.loads(line)
                self._left[row["rank"]] = row["left"]
                self._running.add(name := f"writer-{row['rank']}")
                self._alive_at[name] = time.monotonic()
        return self.steps - sum(self._left.values())

    def _look_for_sign(self, rank: int) -> None:
        with suppress(FileNotFoundError):
            sign = self._path.with_name(SIGN_OF_LIFE.format(rank=rank)).read_text()
            if sign != self._signs.get(rank):
                self._signs[rank], self._alive_at[f"writer-{rank}"] = sign, time.monotonic()

    def phase(self, name: str) -> str:
        """Return the phase of a writer: `load` until its first line."""
        return "run" if name in self._running else "load"

    def silent_for(self, name: str, started_at: float) -> float:
        """Return the seconds since a writer's last line or sign of life, or its start (on the monotonic clock)."""
        return time.monotonic() - max(started_at, self._alive_at.get(name, 0.0))
