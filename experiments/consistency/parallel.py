"""Measurements in processes: one process per world builds it and forks one per measurement, which share its memory."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkProcess
from typing import Any

import torch

FORK = multiprocessing.get_context("fork")
POLL_S = 0.2

Task = tuple[str, str]
"""A loss and a stage of its measurement."""
Prepare = Callable[[int], Callable[[str, str], None]]
"""Builds a world and returns the function that measures a task of it and writes the result."""


def measure_all(tasks: Mapping[int, Sequence[Task]], prepare: Prepare, *, jobs: int, seconds: float | None) -> None:
    """Run the tasks of every world; a task that fails leaves no result and stops no other.

    Args:
        tasks: By world, in the order in which they begin.
        prepare: Called once per world, in a process of its own.
        jobs: Processes that compute at a time, with one thread each.
        seconds: Time after which running tasks are ended and no other begins; None: no limit.
    """
    torch.set_num_threads(1)  # before the fork: a pool of threads would not survive it
    deadline = time.monotonic() + (float("inf") if seconds is None else seconds)
    slots = FORK.Semaphore(jobs)
    worlds = [
        FORK.Process(target=_world, args=(number, own, prepare, slots, deadline))
        for number, own in tasks.items()
        if own
    ]
    for process in worlds:
        process.start()
    for process in worlds:
        process.join()


def _world(number: int, tasks: Sequence[Task], prepare: Prepare, slots: Any, deadline: float) -> None:
    """Build a world, then run its tasks until none is left or time is up."""
    waiting, running = list(tasks), list[ForkProcess]()
    with slots:
        measure = prepare(number)
    while (waiting or running) and time.monotonic() < deadline:
        for process in [process for process in running if not process.is_alive()]:
            running.remove(process)
            slots.release()
        if waiting and slots.acquire(timeout=POLL_S):
            running.append(FORK.Process(target=measure, args=waiting.pop(0)))
            running[-1].start()
        elif not waiting:
            time.sleep(POLL_S)
    for process in running:
        process.terminate()
        process.join()
        slots.release()
