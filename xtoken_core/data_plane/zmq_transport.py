"""ZeroMQ transport: one DEALER socket per thread; requests are repeated on a new connection when theirs is lost."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.allocator import CLIENT_KEEPS, set_allocator
from xtoken_core.data_plane.frames import TooManyFramesError, receive_frames, send_frames
from xtoken_core.data_plane.transport import Reply, Transport
from xtoken_core.errors import QueueUnreachableError
from xtoken_core.wire import QueueError
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import Buffer

REPLY_S = 5.0
PAUSE_S = 0.05
SEND_S = 5.0
HANDSHAKE_MS = 5000
SOON_S = 0.02
"""How long a reply is awaited without checking the connection."""
BROKEN = zmq.EVENT_DISCONNECTED
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


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


class Connection:
    """Socket that belongs to one thread.

    Args:
        context: Context of the transport.
        address: Address of the queue; its token or keys are read again.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: Address) -> None:
        self.address = address
        self._socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        try:
            # Closing drops what was not sent: the request is repeated on another connection anyway.
            self._socket.linger = 0
            self._socket.sndtimeo = int(SEND_S * 1000)
            self._socket.rcvtimeo = int(SOON_S * 1000)
            self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
            self._socket.setsockopt(zmq.IPV6, int(address.is_ipv6))
            address.authenticate(self._socket)
            # Before `connect`, or the first refusal could be missed.
            self._monitor = self._socket.get_monitor_socket(BROKEN | REFUSED)
            self._socket.connect(address.url)
        except BaseException:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def send(self, header: bytes, buffers: Sequence[Buffer]) -> None:
        """Send one message; large buffers are not copied and must not change until it is answered.

        Raises:
            zmq.Again: The queue accepts no more for now.
            QueueUnreachableError: The queue has refused the token or key.
        """
        try:
            send_frames(self._socket, header, buffers)
        except zmq.Again:
            # libzmq never reconnects a refused socket, which takes no message then: the reason is in the monitor.
            while self._monitor.poll(0):
                self._has_broken()
            raise

    def receive(self, request: str, deadline: float) -> tuple[m.AnyReply, list[Buffer]] | None:
        """Return the reply to a request; None if the connection breaks or the deadline (monotonic clock) passes.

        Raises:
            QueueUnreachableError: The queue refuses the token or key.
            QueueError: `bad_frame` if the peer's reply is not a message.
        """
        while (left := deadline - time.monotonic()) > 0:
            try:
                frames = receive_frames(self._socket)
            except TooManyFramesError as error:
                raise QueueError("bad_frame", f"the peer's reply is no message of this protocol: {error}") from error
            except zmq.Again:
                # Only after a short wait for the reply: polling two sockets costs more than the usual answer takes.
                ready = [source for source, _ in self._poller.poll(int(left * 1000) + 1)]
                if self._monitor in ready and self._has_broken():
                    return None
                continue
            reply = m.decode_reply(frames[0].buffer)
            # Others answer requests that this thread has given up; their replies were under way.
            if reply.id == request:
                return reply, [frame.buffer for frame in frames[1:]]
        return None

    def close(self) -> None:
        """Close the socket and drop unsent messages."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _has_broken(self) -> bool:
        event = int(recv_monitor_message(self._monitor)["event"])
        if event & REFUSED:
            raise QueueUnreachableError(
                f"the queue at {self.address.url} refuses this client: is its token file (or key) the right one?"
            )
        return event == BROKEN
