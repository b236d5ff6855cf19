"""Sessions of browsers that have logged in, and the delay of answers to wrong tokens."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
import time
from collections import Counter, OrderedDict

SESSION_S = 30 * 24 * 3600
MAX_SESSIONS = 1000
DELAY_S = 1.0
"""Seconds before the answer to a wrong token."""
MAX_DELAYED = 16
"""Wrong tokens of one address whose answers are delayed at the same time; meanwhile it may not try another one."""


class Sessions:
    """Sessions in memory; a session ends at log-out, after 30 days, and with the control plane."""

    def __init__(self) -> None:
        self._ends: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()

    def open(self) -> str:
        """Start a session and return its id, the value of the cookie."""
        value = secrets.token_urlsafe(32)
        with self._lock:
            self._ends[_digest(value)] = time.monotonic() + SESSION_S
            while len(self._ends) > MAX_SESSIONS:
                self._ends.popitem(last=False)
        return value

    def is_open(self, value: str) -> bool:
        """Return True if `value` is the id of a session that has not ended."""
        with self._lock:
            return time.monotonic() < self._ends.get(_digest(value), 0.0)

    def close(self, value: str) -> None:
        """End a session."""
        with self._lock:
            self._ends.pop(_digest(value), None)


class WrongTokens:
    """Delay of answers to wrong tokens, by address. Used by one event loop."""

    def __init__(self) -> None:
        self._delayed: Counter[str] = Counter()

    def blocks(self, address: str) -> bool:
        """Return True if an address has tried so many wrong tokens that it must wait before the next."""
        return self._delayed[address] >= MAX_DELAYED

    async def delay(self, address: str) -> None:
        """Wait before the answer to a wrong token."""
        self._delayed[address] += 1
        try:
            await asyncio.sleep(DELAY_S)
        finally:
            self._delayed[address] -= 1
            if not self._delayed[address]:
                del self._delayed[address]


def _digest(value: str) -> bytes:
    # A lookup by the hash reveals nothing about the ids by its duration.
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).digest()
