"""Clock of the time that the machine had for the attacked processes: a bound on waiting then holds under foreign load.

It advances by the fraction of all processors that other processes and the hypervisor left over: on an idle machine as
fast as the wall clock, at half its speed while something else takes half of the machine.
"""

import multiprocessing
import os
import threading
import time
from collections import defaultdict
from pathlib import Path

EVERY_S = 0.5
NEGLIGIBLE = 0.1
"""Fraction of the machine below which foreign load counts as none: kernel threads, the counters' resolution."""


class FreeTime:
    """The clock; it may be sent to a child process, and is advanced by `follow` in one process."""

    def __init__(self) -> None:
        # Time of this clock, the wall clock's at which it was taken, and how fast it has advanced last.
        self._state = multiprocessing.get_context("spawn").Array("d", [0.0, time.monotonic(), 1.0])

    def now(self) -> tuple[float, float]:
        """Return the time of this clock and of the wall clock, in seconds."""
        wall = time.monotonic()
        with self._state:
            seconds, at, speed = self._state
        return seconds + max(0.0, wall - at) * speed, wall

    def since(self, began: tuple[float, float]) -> float:
        """Return the seconds since a moment that `now` returned, at most those of the wall clock.

        Between two samples the clock assumes that the load is unchanged, so it may jump by a fraction of `EVERY_S`.
        """
        free, wall = self.now()
        return min(free - began[0], wall - began[1])

    def foreign_load(self) -> float:
        """Return the fraction of the machine that others took last."""
        with self._state:
            return 1.0 - self._state[2]

    def follow(self, over: threading.Event) -> None:
        """Advance the clock until `over`; the processes below this one are those whose time it is."""
        root = os.getpid()
        total, busy, own = _machine_ticks(), _busy_ticks(), _own_ticks(root)
        while not over.wait(EVERY_S):
            before = total, busy, own
            total, busy, own = _machine_ticks(), _busy_ticks(), _own_ticks(root)
            foreign = (busy - before[1] - max(0, own - before[2])) / max(1, total - before[0])
            self._advance(min(1.0, foreign) if foreign > NEGLIGIBLE else 0.0)

    def _advance(self, foreign: float) -> None:
        now = time.monotonic()
        with self._state:
            seconds, at, _ = self._state
            self._state[:] = [seconds + (now - at) * (1.0 - foreign), now, 1.0 - foreign]


def _machine_ticks() -> int:
    return sum(_cpu_line())


def _busy_ticks() -> int:
    """Return the ticks in which a processor worked or was taken by the hypervisor."""
    user, nice, system, _idle, _iowait, *others = _cpu_line()
    return user + nice + system + sum(others)


def _cpu_line() -> list[int]:
    with Path("/proc/stat").open() as file:
        return [int(ticks) for ticks in file.readline().split()[1:9]]


def _own_ticks(root: int) -> int:
    """Return the ticks of a process and all below it, of those included that have ended and been waited for."""
    children: dict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children[int(fields[1])].append(int(entry.name))
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    total, level = 0, [root]
    while level:
        total += sum(ticks.get(process, 0) for process in level)
        level = [child for process in level for child in children[process]]
    return total
