"""ZeroMQ transport: one DEALER socket per thread, lost requests are retried on a new connection."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence

import zmq

from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.allocator import CLIENT_KEEPS, set_allocator
from xtoken_core.data_plane.connection import Connection
from xtoken_core.data_plane.transport import Reply, Transport
from xtoken_core.errors import QueueUnreachableError
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import Buffer

REPLY_S = 5.0
PAUSE_S = 0.05


class ZmqTransport(Transport):
    """Connection to a queue server. Creating one makes the process keep freed memory for the next frames.

    Args:
        address: Address of the queue.
        patience_s: How long a request is repeated, beyond its own wait, before the queue counts as unreachable.
    """

    def __init__(self, address: Address, *, patience_s: float = 30.0) -> None:
        # Frames of megabytes come and go: fresh pages from the system would cost as much as the copy.
        set_allocator(keep=CLIENT_KEEPS)
        self.address, self.url = address, address.url
        self.patience_s = patience_s
        self._context = zmq.Context()
        self._local = threading.local()
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._lock = threading.Lock()

    def exchange(self, request: m.Request, buffers: Sequence[Buffer], wait_s: float) -> Reply:
        """Send a request. Retry a lost request on a new connection; the queue recognises a repeated one by its id.

        Raises:
            QueueUnreachableError: No reply came within `wait_s` and the patience.
        """
        # Once: a repeated request has the same id, by which the queue recognises it.
        header = m.encode(request)
        deadline = time.monotonic() + wait_s + self.patience_s
        while time.monotonic() < deadline:
            connection = self._connection()
            try:
                connection.send(header, buffers)
                reply = connection.receive(request.id, min(time.monotonic() + wait_s + REPLY_S, deadline))
            except zmq.Again:
                reply = None
            except BaseException:
                self._drop(connection)
                raise
            if reply is not None:
                return reply
            self._drop(connection)
            # A queue that restarts refuses connections at once; without a pause this would be a busy loop.
            time.sleep(PAUSE_S)
        raise QueueUnreachableError(
            f"no reply from {self.address.url} within {wait_s + self.patience_s:g} s: "
            "is the queue running there, and is its token file the one given?"
        )

    def close(self) -> None:
        """Close every thread's connection."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()
        self._context.destroy(linger=0)

    def _connection(self) -> Connection:
        connection: Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = Connection(self._context, self.address)
            self._local.connection = connection
            with self._lock:
                self._connections.add(connection)
        return connection

    def _drop(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()
        self._local.connection = None
