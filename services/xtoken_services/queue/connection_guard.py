"""Guard against peers that make the queue hold memory beside its samples: endless messages, replies never read.

libzmq keeps the parts of a message until the last one has come. It limits neither their number nor their sum, and does
not report how much it holds for which peer. So a thread watches the memory of the process, however busy the server is.
While that exceeds what samples explain, it disconnects peers that have completed no message lately, the offenders among
them. For the others this is a lost connection, and their clients ask again on a new one.
"""

from __future__ import annotations

import gc
import logging
import select
import threading
import time
from collections.abc import Callable, Iterable

from xtoken_core.wire.bounds import MAX_CONNECTIONS
from xtoken_services.queue.connections import Connections, disconnect
from xtoken_services.queue.memory import resident_bytes, trim

log = logging.getLogger("xtoken.queue")

SPARE_BYTES = 64 << 20
HELD_FACTOR = 1.25
SILENT_S, BUSY_S = 0.1, 0.5
"""Time without a complete message after which a peer may be disconnected, and for how long the server may read none."""
LONG_S, SHORT_S = 0.05, 0.002
"""Time between two checks, at most; the short one while memory climbs, and after a cut."""
MOVED_BYTES = 1 << 20
FEW = 4
"""Peers of the first cut; while memory stays above the allowance, each cut takes twice as many as the last one."""
MAX_PAUSE_S = 6.4
"""Time between two cuts that did not help, at most."""


class ConnectionGuard:
    """Memory that all connections of a socket may use together.

    Args:
        connections: Connections of the server's socket.
        allowance: Bytes allowed beside `HELD_FACTOR` times what is held and the process's initial memory; never raised.
        held: Returns the bytes of samples and bookkeeping; called on the guard's thread.

    Attributes:
        heard: Time of the last complete message (monotonic clock) by file descriptor, set by the server.
        cut_at: Time of the last cut by file descriptor: what its peer had sent before is dropped.
        drained_at: Time at which the server had read every complete message, set by the server.
    """

    def __init__(self, connections: Connections, allowance: int, held: Callable[[], int]) -> None:
        self.connections = connections
        self.allowance, self._held = allowance, held
        self.heard: dict[int, float] = {}
        self.cut_at: dict[int, float] = {}
        self.drained_at = 0.0
        self._excess_before = self._disconnected = 0
        self._last_cut = -LONG_S
        self._reset(0.0)
        # What the process needs before any client: interpreter, libraries, a replayed journal's overhead.
        self._baseline = resident_bytes() - held()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="connection guard", daemon=True)

    def start(self) -> None:
        """Check memory on a thread until `close`."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, if it was started."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        pause = LONG_S
        while not self._over.wait(pause):
            pause = self.check(time.monotonic())

    def check(self, now: float) -> float:
        """Check memory, disconnect silent peers if there is too much, and return the time until the next check.

        Args:
            now: Time by the monotonic clock.
        """
        excess = self._excess()
        if excess > self._excess_at_cut + MOVED_BYTES:  # it climbs
            self._next_cut = now
        if excess > 0 and now >= self._next_cut:
            # Only what is really held may cost peers their connections: garbage and free pages go first.
            gc.collect(0)
            trim()
            excess = self._excess()
        moved, self._excess_before = excess - self._excess_before, excess
        if excess <= 0:
            self._reset(now)
            return SHORT_S if moved > MOVED_BYTES else LONG_S
        # While memory falls, what the last cut freed is still being returned.
        if now >= self._next_cut and moved > -MOVED_BYTES:
            self._cut(excess, now)
        return min(self._pause, LONG_S)

    def _reset(self, now: float) -> None:
        self._within_at, self._excess_at_cut = now, 0
        self._cut_size, self._pause, self._next_cut = FEW, SHORT_S, now

    def _cut(self, excess: int, now: float) -> None:
        """Disconnect silent peers; each time that memory has not moved since doubles the pause until the next cut."""
        # A peer that has just connected may not be silent yet, and libzmq returns later what the last cut freed: idle
        # ones are not cut in place of the offenders.
        waits = now - self._last_cut <= LONG_S and excess <= self._excess_at_cut + MOVED_BYTES
        lasts = excess > SPARE_BYTES or now - self._within_at > SILENT_S
        victims = self._silent(now, idle=lasts and not waits)[: self._cut_size]
        if waits and not victims:
            return
        for number in victims:
            # Before the server can read what it has sent; its descriptor stays open until libzmq notices.
            self.heard[number] = self.cut_at[number] = now
            disconnect(number)
        if victims:
            before, self._last_cut = self._disconnected.bit_length(), now
            self._disconnected += len(victims)
            self._cut_size = min(2 * self._cut_size, MAX_CONNECTIONS)
            # At powers of two: an attack writes a few lines, not one per cut.
            if self._disconnected.bit_length() > before:
                log.warning(
                    "memory is %d bytes above the allowance: %d peers disconnected so far", excess, self._disconnected
                )
        # If cutting does not help, the cause is another.
        helped_or_climbs = abs(excess - self._excess_at_cut) > MOVED_BYTES
        self._pause = SHORT_S if helped_or_climbs else min(2 * self._pause, MAX_PAUSE_S)
        self._next_cut, self._excess_at_cut = now + self._pause, excess

    def _excess(self) -> int:
        """Return the bytes that this process uses beyond its allowance."""
        return resident_bytes() - self._baseline - int(self._held() * HELD_FACTOR) - self.allowance

    def _silent(self, now: float, *, idle: bool) -> list[int]:
        """Return connections without a complete message lately: those that are sending first, then the newest.

        Idle connections hold little, and clients that were there before an attack are older than it.

        Args:
            now: Time by the monotonic clock.
            idle: Those that are not sending count too.
        """
        accepted = self.connections.open()
        last = {number: max(since, self.heard.get(number, since)) for number, since in accepted.items()}
        silent = [number for number, heard in last.items() if now - heard > SILENT_S]
        sending = _with_unread_bytes(silent)
        # What an idle client has sent may wait for a busy server.
        read_until = max(self.drained_at, now - BUSY_S)
        victims = [number for number in silent if number in sending or (idle and read_until - last[number] > SILENT_S)]
        return sorted(victims, key=lambda number: (number in sending, accepted[number]), reverse=True)


def _with_unread_bytes(numbers: Iterable[int]) -> set[int]:
    """Return which of these file descriptors have unread bytes."""
    poll = select.poll()
    for number in numbers:
        poll.register(number, select.POLLIN)
    return {number for number, _ in poll.poll(0)}
