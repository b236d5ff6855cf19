"""Waits of this process for programs of others, which its heartbeats name."""

from __future__ import annotations

import math
import time

QUIET_S = 5.0
"""Seconds after which a wait is named."""
_OPEN: set[Wait] = set()


class Wait:
    """A wait for an answer, as long as its context lasts.

    Attributes:
        whom: Who is waited for, and why there is no answer yet; empty: not known.
    """

    def __init__(self) -> None:
        self.whom, self.began = "", time.monotonic()

    def __enter__(self) -> Wait:
        _OPEN.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        _OPEN.discard(self)


def longest_wait() -> str:
    """Return the longest wait in words, with its seconds; empty up to `QUIET_S`."""
    began, whom = min(((wait.began, wait.whom) for wait in tuple(_OPEN) if wait.whom), default=(math.inf, ""))
    seconds = time.monotonic() - began
    return f"waiting {seconds:.0f} s for {whom}" if seconds > QUIET_S else ""
