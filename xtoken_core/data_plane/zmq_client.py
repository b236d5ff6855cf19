"""The client of a real queue: one DEALER socket per thread, requests repeated on a new connection until answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import zmq

from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.client import DataPlaneClient
from xtoken_core.errors import QueueUnreachableError
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import Buffer

REPLY_S = 5.0
HANDSHAKE_MS = 5000
ZERO_COPY_BYTES = 1 << 14


class ZmqDataPlaneClient(DataPlaneClient):
    """A connection to a queue server.

    Args:
        address: Where the queue is.
        patience_s: How long a request is repeated, beyond its own wait, before the queue counts as unreachable.
    """

    def __init__(self, address: Address, *, patience_s: float = 30.0) -> None:
        super().__init__()
        self.address = address
        self.patience_s = patience_s
        self._context = zmq.Context()
        self._local = threading.local()
        self._sockets: set[zmq.Socket[bytes]] = set()
        self._lock = threading.Lock()

    def exchange(self, request: m.Request, buffers: Sequence[Buffer], wait_s: float) -> tuple[m.AnyReply, list[Buffer]]:
        """Send the request until it is answered; the queue knows a repeated one by its id."""
        header = m.encode(request)
        deadline = time.monotonic() + wait_s + self.patience_s
        while time.monotonic() < deadline:
            socket = self._socket()
            try:
                socket.send(header, zmq.SNDMORE if buffers else 0)
                for number, buffer in enumerate(buffers, start=1):
                    more = zmq.SNDMORE if number < len(buffers) else 0
                    socket.send(buffer, more, copy=memoryview(buffer).nbytes < ZERO_COPY_BYTES)
                answer = self._receive(socket, request.id, min(time.monotonic() + wait_s + REPLY_S, deadline))
            except zmq.Again:
                answer = None
            if answer is not None:
                return answer
            self._drop(socket)
        raise QueueUnreachableError(
            f"nobody answers at {self.address.url} within {wait_s + self.patience_s:g} s: "
            "is the queue running there, and is its token file the one given?"
        )

    def close(self) -> None:
        """Close every thread's socket."""
        with self._lock:
            sockets, self._sockets = list(self._sockets), set()
        for socket in sockets:
            socket.close(linger=0)
        self._context.term()

    def _receive(
        self, socket: zmq.Socket[bytes], request_id: str, deadline: float
    ) -> tuple[m.AnyReply, list[Buffer]] | None:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not socket.poll(int(left * 1000) + 1, zmq.POLLIN):
                return None
            frames = socket.recv_multipart(copy=False)
            reply = m.decode_reply(frames[0].buffer)
            if reply.id == request_id:
                return reply, [frame.buffer for frame in frames[1:]]

    def _socket(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] | None = getattr(self._local, "socket", None)
        if socket is None:
            socket = self._context.socket(zmq.DEALER)
            socket.linger = 0
            socket.sndtimeo = int(REPLY_S * 1000)
            socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
            self.address.authenticate(socket)
            socket.connect(self.address.url)
            self._local.socket = socket
            with self._lock:
                self._sockets.add(socket)
        return socket

    def _drop(self, socket: zmq.Socket[bytes]) -> None:
        with self._lock:
            self._sockets.discard(socket)
        socket.close(linger=0)
        self._local.socket = None
