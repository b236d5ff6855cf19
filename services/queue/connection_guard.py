"""Guard against peers that make the queue hold memory beside its samples: endless messages, replies never read.

libzmq keeps the parts of a message until the last one has come. It limits neither their number nor their sum, and does
not report how much it holds for which peer. So the guard watches the memory of the process: while that exceeds what
samples explain, it disconnects all peers that have completed no message lately, the offenders among them. For the
others this is a lost connection, and their clients ask again on a new one.
"""

from __future__ import annotations

import logging
import os
import socket as sockets
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from services.queue.memory import resident_bytes, trim

log = logging.getLogger("xtoken.queue")

SPARE_BYTES = 64 << 20
HELD_FACTOR = 1.25
TURNS = 2
MAX_FRUITLESS_CHECKS = 10
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


class ConnectionGuard:
    """Connections of a bound socket, and the memory that they may use together.

    Args:
        socket: The server's socket; its monitor is used.
        allowance: Bytes allowed beside `HELD_FACTOR` times the samples and the process's initial memory.
        burst: Most messages that one turn of the server's loop receives.
        held: Bytes of samples that are held already.
    """

    def __init__(self, socket: zmq.Socket[bytes], allowance: int, burst: int, held: int = 0) -> None:
        self.allowance, self._burst = allowance, burst
        self._socket = socket
        self._last_heard: dict[int, int] = {}
        self._turn = 0
        self._fruitless = 0
        self._baseline = resident_bytes() - held
        where = f"inproc://connections-{id(self)}"
        socket.monitor(where, EVENTS)
        self._monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        self._monitor.rcvhwm = 0
        self._monitor.connect(where)

    def close(self) -> None:
        """Close the monitor; to be called before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def heard(self, number: int) -> None:
        """Record a complete message from the connection with this file descriptor."""
        if number in self._last_heard:
            self._last_heard[number] = self._turn

    def check(self, held: int) -> None:
        """Check memory and disconnect silent peers; to be called regularly between two turns of the server's loop.

        Args:
            held: Bytes of samples.
        """
        self._turn += 1
        self._update_connections()
        excess = self._excess(held)
        if excess > 0:
            trim()
            excess = self._excess(held)
        if excess <= 0:
            self._fruitless = 0
            return
        victims = self._silent()
        for number in victims:
            disconnect(number)
            del self._last_heard[number]
        if victims:
            log.warning("memory is %d bytes above the allowance: disconnecting %d peers", excess, len(victims))
            self._fruitless = 0
            return
        self._fruitless += 1
        if self._fruitless >= MAX_FRUITLESS_CHECKS:
            log.info("memory is %d bytes above the allowance with no peer to blame: raising the baseline", excess)
            self._baseline += excess
            self._fruitless = 0

    def _excess(self, held: int) -> int:
        """Return the bytes that this process uses beyond its allowance."""
        return resident_bytes() - self._baseline - int(held * HELD_FACTOR) - self.allowance

    def _update_connections(self) -> None:
        """Process the monitor's events of new and closed connections."""
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._last_heard[int(event["value"])] = self._turn
            else:
                self._last_heard.pop(int(event["value"]), None)

    def _silent(self) -> list[int]:
        """Return connections without a complete message for so long that the loop would have read one from each."""
        turns = TURNS + 2 * len(self._last_heard) // self._burst
        return [number for number, turn in self._last_heard.items() if self._turn - turn > turns]


def disconnect(number: int) -> None:
    """Shut down the connection with this file descriptor; libzmq notices and closes it."""
    with suppress(OSError), sockets.socket(fileno=os.dup(number)) as connection:
        connection.shutdown(sockets.SHUT_RDWR)
