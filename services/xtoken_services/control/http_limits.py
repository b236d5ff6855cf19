"""Limits of the HTTP server: connections, headers, bodies, and the time that a peer may take for each.

They hold before a token is checked. uvicorn bounds neither the time nor the size of a request's headers, nor the
connections of an address, so its protocol is extended here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from xtoken_services.common.processes.descriptors import descriptor_limit
from xtoken_services.control.problems import problem

MAX_CONNECTIONS = 2048
MAX_PER_ADDRESS = 1024
DESCRIPTORS_PER_CONNECTION = 2
"""The socket, and a file that a response sends."""
WANTED_DESCRIPTORS = 2 * DESCRIPTORS_PER_CONNECTION * MAX_CONNECTIONS
HEADER_S = 5.0
"""Seconds from a connection, or the first byte of a further request, to the end of its headers."""
BODY_S = 30.0
"""Seconds from the headers to the end of the body."""
STALLED_S = 60.0
"""Seconds for which a peer may leave a response unread while the connection's buffer is full."""
KEEP_ALIVE_S = 5
MAX_HEADER_BYTES = 32 << 10
MAX_HEADERS = 100
MAX_BODY_BYTES = 1 << 20
MAX_OPEN_BODY_BYTES = 16 << 10
"""Largest body of a request that needs no token: the login form."""
MAX_JSON_VALUES = 4096
"""Largest number of commas, objects and lists of a JSON body: each may become an error, at 100 microseconds each."""
REASONS = {408: b"Request Timeout", 431: b"Request Header Fields Too Large", 503: b"Service Unavailable"}


def connection_limit() -> int:
    """Return the largest number of connections, which leaves half of the descriptors to everything else."""
    limit = descriptor_limit()
    return MAX_CONNECTIONS if limit is None else max(1, min(MAX_CONNECTIONS, limit // (2 * DESCRIPTORS_PER_CONNECTION)))


class Connections:
    """Open connections of a server by address, oldest first.

    Attributes:
        total: Number of connections.
    """

    def __init__(self) -> None:
        self.total = 0
        self._by_address: dict[str, dict[LimitedProtocol, None]] = {}

    def add(self, connection: LimitedProtocol) -> None:
        """Add a connection."""
        self._by_address.setdefault(connection.address, {})[connection] = None
        self.total += 1

    def discard(self, connection: LimitedProtocol) -> None:
        """Remove a connection, if it is there."""
        peers = self._by_address.get(connection.address, {})
        if connection in peers:
            del peers[connection]
            self.total -= 1
            if not peers:
                del self._by_address[connection.address]

    def of(self, address: str) -> Collection[LimitedProtocol]:
        """Return the connections of an address, oldest first."""
        return self._by_address.get(address, {}).keys()

    def busiest(self) -> str:
        """Return the address with the most connections."""
        return max(self._by_address, key=lambda address: len(self._by_address[address]), default="")


_connections: WeakKeyDictionary[ServerState, Connections] = WeakKeyDictionary()


class LimitedProtocol(HttpToolsProtocol):
    """One connection, with the limits of this module.

    A connection that exceeds the number of connections takes the place of the oldest one that has no request in
    progress: peers that connect and send nothing are closed, not those that send a request.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limit = connection_limit()
        self._peers = _connections.setdefault(self.server_state, Connections())
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._in_headers = True

    @property
    def address(self) -> str:
        """Address of the peer."""
        return self.client[0] if self.client else ""

    @property
    def waiting(self) -> bool:
        """True if no request is in progress: its headers are incomplete, or it has been answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in its base class
        """Admit the connection, or refuse it."""
        super().connection_made(transport)
        self._start_timer(HEADER_S)
        self._peers.add(self)
        # Its own address first: one client that opens too many must not push out others.
        if len(self._peers.of(self.address)) > min(MAX_PER_ADDRESS, self._limit):
            self._make_room(self.address)
        elif self._peers.total > self._limit:
            self._make_room(self._peers.busiest())

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        self._peers.discard(self)
        self._stop_timer()
        if self._stalled is not None:
            self._stalled.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse a part of a request."""
        if self.transport.is_closing():
            return
        # The first bytes of a further request on a kept connection; a new one has its timer already.
        if self._in_headers and self._timer is None:
            self._start_timer(HEADER_S)
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._in_headers, self._header_bytes = True, 0
        if self._timer is None:
            self._start_timer(HEADER_S)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Add a part of the target."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header."""
        self._count(len(name) + len(value))
        if len(self.headers) >= MAX_HEADERS:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request."""
        self._in_headers = False
        self._start_timer(BODY_S)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the body."""
        self._stop_timer()
        self._in_headers = True
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Start the timeout for a peer that does not read."""
        super().pause_writing()
        if self._stalled is None:
            # Abort, not close: closing would wait for the buffer that the peer does not read.
            self._stalled = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel that timeout."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def refuse(self, status: int) -> None:
        """Respond without the application, if no response has begun, and close the connection."""
        self._peers.discard(self)
        if self.transport.is_closing():
            return
        # Half a response followed by a status line would be read as its body.
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            reason = REASONS[status]
            head = b"HTTP/1.1 %d %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % (status, reason)
            self.transport.write(head)
        self.transport.close()

    def _make_room(self, address: str) -> None:
        waiting = (peer for peer in self._peers.of(address) if peer.waiting and peer is not self)
        # If all others have a request in progress, the newcomer is the one that is refused.
        next(waiting, self).refuse(503)

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError("the headers are too large")  # the parser turns it into a response with status 400

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self.refuse, 408)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class BodyLimit:
    """Middleware that limits the size of request bodies, and the number of values in JSON.

    Args:
        app: The application.
        open_paths: Paths that need no token, for which less is accepted.
    """

    def __init__(self, app: ASGIApp, open_paths: Collection[str]) -> None:
        self._app, self._open_paths = app, frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond with 413, or pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = MAX_OPEN_BODY_BYTES if scope["path"] in self._open_paths else MAX_BODY_BYTES
        if _length(scope) > limit:
            await problem(413, f"the request body is larger than {limit} bytes")(scope, receive, send)
        else:
            values = MAX_JSON_VALUES if _is_json(scope) else limit
            await self._app(scope, _bounded(receive, limit, values), send)


def _length(scope: Scope) -> float:
    length = dict(scope["headers"]).get(b"content-length", b"0")
    # A length that is no number is infinite, and refused; 20 digits are beyond any body.
    return int(length) if length.isdigit() and len(length) < 20 else float("inf")


def _is_json(scope: Scope) -> bool:
    return any(b"json" in value.lower() for name, value in scope["headers"] if name == b"content-type")


def _bounded(receive: Receive, limit: int, values: int) -> Receive:
    """Return a `receive` that refuses a body once it has too many bytes or values.

    Args:
        receive: The server's.
        limit: Largest number of bytes.
        values: Largest number of bytes that begin a value: `,`, `[` and `{`.
    """
    size = begun = 0

    async def bounded() -> Message:
        nonlocal size, begun
        message = await receive()
        body = message.get("body", b"")
        size += len(body)
        # Counted without parsing, at a byte's cost each, also inside strings: an upper bound is enough.
        begun += len(body) - len(body.translate(None, b",[{"))
        if size > limit:
            raise HTTPException(413, f"the request body is larger than {limit} bytes")
        if begun > values:
            raise HTTPException(413, f"the request body has more than {values} values")
        return message

    return bounded
