"""Connections of a bound socket: counted by its monitor, and bounded in all and per address.

libzmq accepts every connection, and stops the process when it runs out of descriptors at an ipc address. So the soft
limit of descriptors is raised to the hard one at start, connections are bounded well below it, and a thread of its own
shuts down those beyond the bound, however busy the server is: first the oldest that have not finished their handshake.
"""

from __future__ import annotations

import logging
import socket as sockets
import threading
import time
from collections import Counter
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from xtoken_core.wire.bounds import MAX_CONNECTIONS
from xtoken_services.common.processes.descriptors import raise_descriptor_limit

log = logging.getLogger("xtoken.queue")

RESERVE = 64
"""Descriptors for everything else: the journal, metrics, libzmq itself, connections that are just being closed."""
LEAST = 16
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


def connection_limit() -> int:
    """Raise the limit of descriptors, and return the largest number of connections that it leaves room for."""
    limit = raise_descriptor_limit()
    return MAX_CONNECTIONS if limit is None else max(min(MAX_CONNECTIONS, limit // 2 - RESERVE), LEAST)


class Connections:
    """Connections of a bound socket.

    Args:
        socket: The server's socket; its monitor is used.
        most: Connections at most; one address other than this machine may have a quarter of them.
    """

    def __init__(self, socket: zmq.Socket[bytes], most: int) -> None:
        self.most, self.most_of_address = most, max(most // 4, 1)
        self._socket = socket
        self._lock = threading.Lock()
        self._address: dict[int, str] = {}
        self._accepted: dict[int, float] = {}
        self._counts: Counter[str] = Counter()
        self._pending: dict[int, None] = {}
        self._closing: set[int] = set()
        where = f"inproc://connections-{id(self)}"
        socket.monitor(where, EVENTS)
        self._monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        # Unlimited: a dropped event would leave a connection uncounted, or counted for ever.
        self._monitor.rcvhwm = 0
        self._monitor.connect(where)
        self._thread = threading.Thread(target=self._follow, name="connections", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following; to be called before the socket is closed."""
        self._socket.disable_monitor()
        self._thread.join()

    def open(self) -> dict[int, float]:
        """Return the times (monotonic clock) at which the present connections were accepted, by descriptor."""
        with self._lock:
            return {number: at for number, at in self._accepted.items() if number not in self._closing}

    def is_full(self, address: str) -> bool:
        """Return whether an address has more connections than it may."""
        with self._lock:
            return self._is_full(address)

    def _is_full(self, address: str) -> bool:
        if len(self._address) - len(self._closing) > self.most:
            return True
        return not _is_local(address) and self._counts[address] > self.most_of_address

    def _follow(self) -> None:
        """Process the monitor's events until it is disabled."""
        dropped = 0
        while True:
            event = recv_monitor_message(self._monitor)
            kind, number = event["event"], int(event["value"])
            if kind == zmq.EVENT_MONITOR_STOPPED:
                break
            victim = None
            with self._lock:
                if kind == zmq.EVENT_ACCEPTED:
                    victim = self._add(number)
                elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._pending.pop(number, None)
                else:
                    self._remove(number)
            if victim is not None:
                disconnect(victim)
                dropped += 1
                # At powers of two: a flood writes a few lines, not one per connection.
                if dropped & (dropped - 1) == 0:
                    log.warning("%d connections beyond the bound of %d were closed so far", dropped, self.most)
        self._monitor.close(linger=0)

    def _add(self, number: int) -> int | None:
        """Record a new connection; return the one to close for it, if there are too many."""
        self._remove(number)
        address = address_of(number)
        self._address[number], self._accepted[number] = address, time.monotonic()
        self._counts[address] += 1
        self._pending[number] = None
        if not self._is_full(address):
            return None
        local = _is_local(address)
        # The oldest without a handshake; the new connection itself is among them, so there always is one.
        victim = next(i for i in self._pending if local or self._address[i] == address)
        del self._pending[victim]
        # Until libzmq reports its end it stays known, but counts no more: its number may not be reused yet.
        self._closing.add(victim)
        self._counts[self._address[victim]] -= 1
        return victim

    def _remove(self, number: int) -> None:
        address = self._address.pop(number, None)
        if address is None:
            return
        del self._accepted[number]
        self._pending.pop(number, None)
        if number in self._closing:
            self._closing.discard(number)
        else:
            self._counts[address] -= 1
        if self._counts[address] <= 0:
            del self._counts[address]


def disconnect(number: int) -> None:
    """Shut down the connection with this file descriptor; libzmq notices and closes it. Needs no descriptor."""
    with suppress(OSError):
        connection = sockets.socket(fileno=number)
        try:
            # libzmq owns the descriptor: it is borrowed and detached, never closed here.
            connection.shutdown(sockets.SHUT_RDWR)
        finally:
            connection.detach()


def address_of(number: int) -> str:
    """Return the peer's IP address; empty at an ipc address, or if the connection is gone already."""
    try:
        connection = sockets.socket(fileno=number)
    except OSError:
        return ""
    try:
        name = connection.getpeername()
    except OSError:
        return ""
    finally:
        connection.detach()
    return str(name[0]) if isinstance(name, tuple) else ""


def _is_local(address: str) -> bool:
    return not address or address.removeprefix("::ffff:").startswith("127.") or address == "::1"
