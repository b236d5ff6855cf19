"""How often a worker may fail: restarts with back-off, reset by the run's progress."""

from __future__ import annotations

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0


class RestartPolicy:
    """Counts one group's failures in a row without progress of the run in between.

    Args:
        limit: Restarts allowed without progress.
        first_delay_s: Seconds before the first of them; each further one waits twice as long.
        failures: Those in a row before now.
        highest: The highest step reached before now.
    """

    def __init__(
        self, limit: int, *, first_delay_s: float = FIRST_DELAY_S, failures: int = 0, highest: int = 0
    ) -> None:  # fmt: skip
        self.limit = limit
        self.failures = failures
        self.highest = highest
        self._first_delay_s = first_delay_s

    def failed(self, step: int) -> float | None:
        """The group has failed while the run stood at a step; returns the seconds to wait, None to give the run up.

        Progress is a step that the run has not reached before: doing the steps since a checkpoint again is none.
        """
        if step > self.highest:
            self.highest, self.failures = step, 0
        self.failures += 1
        if self.failures > self.limit:
            return None
        return float(min(LONGEST_DELAY_S, self._first_delay_s * 2 ** (self.failures - 1)))
