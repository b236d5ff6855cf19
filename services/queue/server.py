"""A ROUTER socket around the engine: decode, answer or park, send; nothing here knows what the messages mean."""

from __future__ import annotations

import logging
import socket as sockets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from xtoken_core.data_plane.address import USER, Address, create_token
from xtoken_core.errors import ConfigError, XtokenError
from xtoken_core.protocol.engine import Engine
from xtoken_core.wire import QueueError
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import Buffer

log = logging.getLogger("xtoken.queue")

TICK_S = 0.25
BURST = 256
HIGH_WATER = 10_000
HANDSHAKE_MS = 5000
ZERO_COPY_BYTES = 1 << 14


@dataclass(slots=True)
class Parked:
    """A request that waits for a change, and until when."""

    peer: bytes
    request: m.AnyRequest
    buffers: list[Buffer]
    deadline: float


class Server:
    """The queue server.

    Args:
        engine: What answers.
        address: Where to bind. `ipc://` needs a private directory; loopback tcp makes or reads its token file.

    Raises:
        XtokenError: The address is in use or cannot be bound.
        ConfigError: A tcp address without a token file.
    """

    def __init__(self, engine: Engine, address: Address) -> None:
        self.engine = engine
        self.address = address
        self._context = zmq.Context()
        self._auth: ThreadAuthenticator | None = None
        self._parked: list[Parked] = []
        self._stop = False
        try:
            self._socket = self._bind()
        except BaseException:
            self._end()
            raise

    def stop(self) -> None:
        """Leave `serve` soon; safe to call from a signal handler."""
        self._stop = True

    def serve(self) -> None:
        """Answer until stopped, then close the socket and remove its file."""
        seen, next_tick = self.engine.changes, time.monotonic()
        try:
            while not self._stop:
                if self._socket.poll(int(TICK_S * 1000), zmq.POLLIN):
                    self._receive_burst()
                now = time.monotonic()
                if now >= next_tick:
                    self.engine.tick()
                    next_tick = now + TICK_S
                if self._parked and (self.engine.changes != seen or any(p.deadline <= now for p in self._parked)):
                    seen = self._retry_parked(now)
        finally:
            self.close()

    def close(self) -> None:
        """Close the socket and remove its file."""
        self._socket.close(linger=0)
        self._end()
        if self.address.ipc_path is not None:
            self.address.ipc_path.unlink(missing_ok=True)

    def _bind(self) -> zmq.Socket[bytes]:
        path = self.address.ipc_path
        if path is not None:
            _check_private(path)
        elif self.address.token_file is None:
            raise ConfigError(f"{self.address.url} needs a token file: name one by --token-file, it is made if missing")
        else:
            token = create_token(self.address.token_file)
            self._auth = ThreadAuthenticator(self._context)
            self._auth.start()
            self._auth.configure_plain(domain="*", passwords={USER.decode(): token})
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, self.engine.memory_limit)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        socket.linger = 0
        socket.plain_server = self._auth is not None
        try:
            socket.bind(self.address.url)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            what = "is in use: stop what listens there, or choose another" if error.errno == zmq.EADDRINUSE else error
            raise XtokenError(f"cannot serve at {self.address.url}: the address {what}") from error
        return socket

    def _end(self) -> None:
        if self._auth is not None:
            self._auth.stop()
        self._context.term()

    def _receive_burst(self) -> None:
        for _ in range(BURST):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._on_message(frames[0].bytes, frames[1:])

    def _on_message(self, peer: bytes, frames: Sequence[zmq.Frame]) -> None:
        header = frames[0].buffer if frames else memoryview(b"")
        try:
            request = m.decode_request(header)
        except QueueError as error:
            self._refuse(peer, m.envelope(header).id, error)
            return
        buffers: list[Buffer] = [frame.buffer for frame in frames[1:]]
        wait_s = float(getattr(request, "wait_s", 0.0))
        if not self._try(peer, request, buffers):
            self._parked.append(Parked(peer, request, buffers, time.monotonic() + wait_s))

    def _try(self, peer: bytes, request: m.AnyRequest, buffers: list[Buffer]) -> bool:
        """Answer a request; False if it has to wait."""
        try:
            answer = self.engine.handle(request, buffers)
        except QueueError as error:
            self._refuse(peer, request.id, error)
            return True
        if answer is None:
            return False
        frames = answer.frames()
        answer.reply.id = request.id
        self._send(peer, answer.reply, frames)
        return True

    def _retry_parked(self, now: float) -> int:
        """Ask the engine again for everything that waits; returns the state of changes this saw."""
        waiting, self._parked = self._parked, []
        seen = self.engine.changes
        for entry in waiting:
            if self._try(entry.peer, entry.request, entry.buffers):
                continue
            if entry.deadline <= now:
                self._send(entry.peer, m.Empty(id=entry.request.id), [])
            else:
                self._parked.append(entry)
        return seen

    def _refuse(self, peer: bytes, request_id: str, error: QueueError) -> None:
        log.debug("refused: %s: %s", error.code, error)
        self._send(peer, m.Failure(id=request_id, code=error.code, message=str(error)[:4096], detail=error.detail), [])

    def _send(self, peer: bytes, reply: m.Reply, buffers: Sequence[memoryview]) -> None:
        try:
            self._socket.send(peer, zmq.SNDMORE | zmq.NOBLOCK)
            self._socket.send(m.encode(reply), zmq.SNDMORE if buffers else 0)
            for number, buffer in enumerate(buffers, start=1):
                more = zmq.SNDMORE if number < len(buffers) else 0
                self._socket.send(buffer, more, copy=buffer.nbytes < ZERO_COPY_BYTES)
        except zmq.ZMQError as error:
            log.warning("a peer is gone or does not read: its reply is dropped, it will ask again (%s)", error)


def _check_private(path: Path) -> None:
    """The socket's directory must be its owner's alone, and nobody may be listening at the path.

    Raises:
        XtokenError: Somebody listens there already, or the directory is missing.
        ConfigError: Others may enter the directory.
    """
    try:
        mode = path.parent.stat().st_mode
    except OSError as error:
        raise XtokenError(f"cannot serve at ipc://{path}: {path.parent}: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError(f"the directory {path.parent} of the queue's socket must be private: chmod 700 it")
    probe = sockets.socket(sockets.AF_UNIX)
    try:
        probe.connect(str(path))
    except OSError:
        return
    finally:
        probe.close()
    raise XtokenError(f"cannot serve at ipc://{path}: the address is in use: stop what listens there")
