"""How many streams of events are open: each holds a connection for as long as its run lasts."""

from __future__ import annotations

import threading

MOST_STREAMS = 500


class Streams:
    """How many streams are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.open = 0

    def enter(self) -> bool:
        """One more; False if there are too many."""
        with self._lock:
            if self.open >= MOST_STREAMS:
                return False
            self.open += 1
            return True

    def leave(self) -> None:
        """One less."""
        with self._lock:
            self.open -= 1
