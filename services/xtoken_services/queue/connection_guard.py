"""Guard against peers that make the queue hold memory beside its samples: endless messages, replies never read.

libzmq keeps the parts of a message until the last one has come. It limits neither their number nor their sum, and does
not report how much it holds for which peer. So the guard watches the memory of the process: while that exceeds what
samples explain, it disconnects all peers that have completed no message lately, the offenders among them. For the
others this is a lost connection, and their clients ask again on a new one.
"""

from __future__ import annotations

import gc
import logging

from xtoken_services.queue.connections import Connections, disconnect
from xtoken_services.queue.memory import resident_bytes, trim

log = logging.getLogger("xtoken.queue")

SPARE_BYTES = 64 << 20
HELD_FACTOR = 1.25
# Full turns of the loop for which a peer may be silent: one can fall between two of its messages.
TURNS = 2
MAX_PAUSE = 64
"""Checks between two cuts that did not help, at most."""


class ConnectionGuard:
    """Memory that all connections of a socket may use together.

    Args:
        connections: Connections of the server's socket.
        allowance: Bytes allowed beside `HELD_FACTOR` times what is held and the process's initial memory; never raised.
        burst: Most messages that one turn of the server's loop receives.
        held: Bytes of samples and bookkeeping that are held already.

    Attributes:
        exceeded: Memory was above the allowance when last checked.
    """

    def __init__(self, connections: Connections, allowance: int, burst: int, held: int = 0) -> None:
        self.connections = connections
        self.allowance, self._burst = allowance, burst
        self.exceeded = False
        self._last_heard: dict[int, int] = {}
        self._turn = 0
        self._pause = self._next_pause = 0
        # What the process needs before any client: interpreter, libraries, a replayed journal's overhead.
        self._baseline = resident_bytes() - held

    def heard(self, number: int) -> None:
        """Record a complete message from the connection with this file descriptor."""
        if number in self._last_heard:
            self._last_heard[number] = self._turn

    def check(self, held: int) -> None:
        """Check memory and disconnect silent peers; to be called regularly between two turns of the server's loop.

        Args:
            held: Bytes of samples and bookkeeping.
        """
        self._turn += 1
        present = self.connections.open()
        # New connections count as heard just now; closed ones leave, since their numbers are used again.
        self._last_heard = {number: self._last_heard.get(number, self._turn) for number in present}
        excess = self._excess(held)
        if excess > 0:
            # Only what is really held may cost peers their connections: garbage and free pages go first.
            gc.collect(0)
            trim()
            excess = self._excess(held)
        self.exceeded = excess > 0
        if not self.exceeded:
            self._pause = self._next_pause = 0
        elif self._pause > 0:
            self._pause -= 1
        else:
            self._cut(excess)

    def _cut(self, excess: int) -> None:
        """Disconnect the silent peers; each time that this has not helped doubles the pause until the next."""
        victims = self._silent()
        for number in victims:
            disconnect(number)
            del self._last_heard[number]
        log.warning("memory is %d bytes above the allowance: disconnecting %d peers", excess, len(victims))
        self._pause = self._next_pause
        # If cutting does not help, the cause is another: no more cuts in every turn.
        self._next_pause = min(2 * self._next_pause + 1, MAX_PAUSE)

    def _excess(self, held: int) -> int:
        """Return the bytes that this process uses beyond its allowance."""
        return resident_bytes() - self._baseline - int(held * HELD_FACTOR) - self.allowance

    def _silent(self) -> list[int]:
        """Return connections without a complete message for so long that the loop would have read one from each."""
        # With many peers a turn reads from a part of them, so all get the turns that a reading from each takes.
        turns = TURNS + 2 * len(self._last_heard) // self._burst
        return [number for number, turn in self._last_heard.items() if self._turn - turn > turns]
