"""Mutants on their tests: one is noticed only by a test that fails twice with it and passes without it.

A test that fails without the mutant as well (a busy machine, an absent package), or fails once only, is left out, and
the mutant is run on the tests behind it. A fork that breaks by itself says nothing of its mutant.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tests.mutation.pool import End, Job, Pool
from tests.mutation.progress import Events
from tests.mutation.selection import Test

FIRST, AGAIN, WITHOUT = "first", "again", "without"
"""The tests with the mutant; the one that failed with the mutant again; that one without the mutant."""

RunTests = Callable[[int, Sequence[str], bool, Path], int]
"""Runs tests in a fork: the number of the mutant, node ids, whether with the mutant, the fork's folder."""


@dataclass(frozen=True)
class _Trial:
    number: int
    nodes: tuple[str, ...]
    phase: str = FIRST
    behind: tuple[str, ...] = ()


class Trials:
    """Runs mutants on their tests.

    Args:
        pool: Runs the forks.
        calls: What the tests take without a mutant.
        events: What was done and is done.
        run_tests: What a fork does.
        start_s: Seconds that a fork takes beside the tests.
    """

    def __init__(
        self, pool: Pool, calls: Mapping[str, Test], events: Events, run_tests: RunTests, start_s: float
    ) -> None:
        self._pool, self._calls, self._events = pool, calls, events
        self._run_tests, self._start_s = run_tests, start_s

    def run(self, nodes: Mapping[int, Sequence[str]]) -> Iterator[tuple[int, bool]]:
        """Yield the number of each mutant that has run by the deadline, and whether it was noticed.

        Args:
            nodes: By mutant, the tests to run, in their order.
        """
        first = [_Trial(number, tuple(tests)) for number, tests in nodes.items()]
        # The longest first: the last ones fill the gaps.
        jobs = deque(map(self._job, sorted(first, key=lambda trial: -self._seconds(trial)[0])))
        for trial, end in self._pool.run(jobs):
            following = self._following(trial, end)
            if isinstance(following, bool):
                yield trial.number, following
            elif following is not None:
                jobs.appendleft(self._job(following))

    def _following(self, trial: _Trial, end: End) -> _Trial | bool | None:
        """Return what comes after a trial: another one, whether the mutant is noticed, or None if it cannot be run."""
        failed = end.outcome != "passed"
        if end.outcome == "broken" or (not trial.nodes and failed):
            self._events.add(broken=trial.number)
            return None
        if trial.phase == FIRST:
            if not failed:
                return False
            test = end.test if end.test in trial.nodes else trial.nodes[0]  # the collection fails: any test shows it
            behind = trial.nodes[trial.nodes.index(test) + 1 :]
            return _Trial(trial.number, (test,), AGAIN, behind)
        if trial.phase == AGAIN and failed:
            return replace(trial, phase=WITHOUT)
        if trial.phase == WITHOUT and not failed:
            return True
        self._events.add(unsteady=trial.nodes[0], mutant=trial.number, phase=trial.phase)
        return _Trial(trial.number, trial.behind) if trial.behind else False

    def _job(self, trial: _Trial) -> Job:
        cpu_s, wall_s = self._seconds(trial)
        action = partial(self._run_tests, trial.number, trial.nodes, trial.phase != WITHOUT)
        return Job(trial, action, self._start_s + 5 * cpu_s, 2 * self._start_s + 60 + 5 * wall_s)

    def _seconds(self, trial: _Trial) -> tuple[float, float]:
        known = [self._calls[node] for node in trial.nodes]
        return sum(test.cpu_s for test in known), sum(test.wall_s for test in known)
