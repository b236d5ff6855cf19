"""Forks side by side: at most a number of them over all packages, each with limits, until a deadline."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
BROKEN = 70
"""Exit status of a fork whose action raised."""

CURRENT = "test"
"""File of a fork's folder that names the test that is running or has failed."""


class Slots(Protocol):
    """A semaphore that several processes use."""

    def acquire(self, block: bool = True) -> bool:
        """Take a slot; False if none is free."""

    def release(self) -> None:
        """Give a slot back."""


class Job(NamedTuple):
    """Work for a fork.

    Attributes:
        key: What the outcome is reported for.
        action: Called in the fork, with a folder of its own; returns the exit status.
        cpu_s: CPU seconds after which the fork is ended.
        wall_s: Seconds of the clock after which it is ended.
    """

    key: Any
    action: Callable[[Path], int]
    cpu_s: float
    wall_s: float


class End(NamedTuple):
    """How a fork has ended.

    Attributes:
        outcome: `passed` (the action returned 0), `failed`, `timeout`, or `broken` (it raised).
        test: The node id in its file `CURRENT`; empty without one.
    """

    outcome: str
    test: str


@dataclass(frozen=True)
class _Running:
    job: Job
    folder: Path
    began: float


class Pool:
    """Runs jobs in forks of this process.

    Args:
        slots: What limits the number of forks of all pools together.
        deadline: Time of the monotonic clock after which no job starts and running ones are ended.
        scratch: Folder for what the jobs write; emptied as they end.
    """

    def __init__(self, slots: Slots, deadline: float, scratch: Path) -> None:
        self._slots, self._deadline, self._scratch = slots, deadline, scratch

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Any, End]]:
        """Run jobs and yield the key and the end of each that has ended by the deadline, in the order of their ends.

        Args:
            jobs: A deque may be extended while the results are read.
        """
        pending = jobs if isinstance(jobs, deque) else deque(jobs)
        running = dict[int, _Running]()
        try:
            while (pending or running) and time.monotonic() < self._deadline:
                while pending and self._slots.acquire(block=False):
                    child, started = self._start(pending.popleft())
                    running[child] = started
                for child, started in list(running.items()):
                    outcome = _outcome(child, started)
                    if outcome:
                        del running[child]
                        yield started.job.key, End(outcome, self._end(child, started))
                time.sleep(0.02)
        finally:
            for child, started in running.items():
                self._end(child, started)

    def _start(self, job: Job) -> tuple[int, _Running]:
        folder = Path(tempfile.mkdtemp(dir=self._scratch, prefix=""))
        child = fork(lambda: self._child(job, folder))
        return child, _Running(job, folder, time.monotonic())

    @staticmethod
    def _child(job: Job, folder: Path) -> int:
        os.setsid()
        limit = int(job.cpu_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
        silent = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(silent, descriptor)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["TMPDIR"] = str(folder)
        tempfile.tempdir = None
        return job.action(folder)

    def _end(self, child: int, started: _Running) -> str:
        """End what a fork has left, which may be gone already; returns the test that it ran last."""
        for step in (lambda: os.killpg(child, signal.SIGKILL), lambda: os.waitpid(child, 0)):
            with contextlib.suppress(ProcessLookupError, ChildProcessError, PermissionError):
                step()
        current = started.folder / CURRENT
        test = current.read_text(encoding="utf-8") if current.exists() else ""
        shutil.rmtree(started.folder, ignore_errors=True)
        self._slots.release()
        return test


def fork(action: Callable[[], int]) -> int:
    """Start an action in a fork that does not outlive this process; returns its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = BROKEN
    try:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        status = action()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _outcome(child: int, started: _Running) -> str:
    """Return how a fork has ended; empty while it runs."""
    done, status, usage = os.wait4(child, os.WNOHANG)
    if not done:
        return "timeout" if time.monotonic() - started.began > started.job.wall_s else ""
    if os.WIFSIGNALED(status) and usage.ru_utime + usage.ru_stime >= started.job.cpu_s:
        return "timeout"
    if os.WIFEXITED(status):
        return {0: "passed", BROKEN: "broken"}.get(os.WEXITSTATUS(status), "failed")
    return "failed"
