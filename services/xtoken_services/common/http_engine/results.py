"""Results of requests that run side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TypeVar

Result = TypeVar("Result")
POLL_S = 1.0


def results_of(futures: Sequence[Future[Result]], alive: Callable[[int], None]) -> list[Result]:
    """Return the results of requests in their order; the first error cancels those that have not begun.

    Args:
        futures: The requests.
        alive: Called while it waits, with the number of requests that are done; what it raises ends the wait.
    """
    try:
        while True:
            done, unfinished = wait(futures, timeout=POLL_S, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()  # raises its error
            if not unfinished:
                return [future.result() for future in futures]
            alive(len(done))
    finally:
        for future in futures:
            future.cancel()
