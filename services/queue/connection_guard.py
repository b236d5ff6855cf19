"""Bounds what peers can make the queue hold beside its samples: messages without an end, answers that nobody reads.

libzmq keeps the parts of a message until the last one has come, however many there are, and offers no limit for their
sum; nor does it tell how much it holds for whom. So the guard looks at the memory of the process. Where that is more
than samples explain, connections that have finished no message lately are cut, the culprits among them. For the others
this is a lost connection: their clients ask again on a new one.
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
HELD_SHARE = 1.25
TURNS = 2
PATIENT_LOOKS = 10
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


class Guard:
    """The connections of a bound socket, and the memory that they may take together.

    Args:
        socket: Bound or about to be; its monitor is taken.
        allowance: Bytes beside `HELD_SHARE` of the samples and what the process has at first.
        burst: Messages that one turn of the server's loop takes at most.
        held: Bytes of samples that are there already.
    """

    def __init__(self, socket: zmq.Socket[bytes], allowance: int, burst: int, held: int = 0) -> None:
        self.allowance, self._burst = allowance, burst
        self._socket = socket
        self._last_heard: dict[int, int] = {}
        self._turn = 0
        self._fruitless = 0
        self._at_first = resident_bytes() - held
        where = f"inproc://connections-{id(self)}"
        socket.monitor(where, EVENTS)
        self._monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        self._monitor.rcvhwm = 0
        self._monitor.connect(where)

    def close(self) -> None:
        """Let the monitor go; before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def heard(self, number: int) -> None:
        """A whole message came from the connection with this file descriptor."""
        if number in self._last_heard:
            self._last_heard[number] = self._turn

    def look(self, held: int) -> None:
        """Called now and then between two turns of the server's loop; `held` bytes of samples are there."""
        self._turn += 1
        self._follow()
        excess = self._excess(held)
        if excess > 0:
            trim()
            excess = self._excess(held)
        if excess <= 0:
            self._fruitless = 0
            return
        victims = self._silent()
        for number in victims:
            cut(number)
            del self._last_heard[number]
        if victims:
            log.warning("%d bytes more than allowed: %d connections are cut", excess, len(victims))
            self._fruitless = 0
            return
        self._fruitless += 1
        if self._fruitless >= PATIENT_LOOKS:
            log.info("%d bytes more than allowed are nobody's: the allowance begins above them", excess)
            self._at_first += excess
            self._fruitless = 0

    def _excess(self, held: int) -> int:
        """Bytes that this process takes beyond what it may."""
        return resident_bytes() - self._at_first - int(held * HELD_SHARE) - self.allowance

    def _follow(self) -> None:
        """Learn of connections that came and went."""
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._last_heard[int(event["value"])] = self._turn
            else:
                self._last_heard.pop(int(event["value"]), None)

    def _silent(self) -> list[int]:
        """Connections without a whole message for so long that each had its turn, had it had one."""
        turns = TURNS + 2 * len(self._last_heard) // self._burst
        return [number for number, turn in self._last_heard.items() if self._turn - turn > turns]


def cut(number: int) -> None:
    """End the connection with this file descriptor; its owner notices and closes it."""
    with suppress(OSError), sockets.socket(fileno=os.dup(number)) as connection:
        connection.shutdown(sockets.SHUT_RDWR)
