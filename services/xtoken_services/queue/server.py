"""Server loop: decode a request, answer it or let it wait, send the reply. Messages have no meaning here."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING

import zmq

from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.frames import (
    MORE_AT_ONCE,
    TooManyFramesError,
    readable,
    receive_frames,
    send_frames,
    skip_frames,
)
from xtoken_core.errors import XtokenError
from xtoken_core.queue.engine import READS, Engine
from xtoken_core.wire import QueueError
from xtoken_core.wire import messages as m
from xtoken_core.wire.bounds import MAX_FRAMES
from xtoken_core.wire.columns import Buffer
from xtoken_services.queue.connection_guard import SPARE_BYTES, ConnectionGuard
from xtoken_services.queue.connections import address_of, connection_limit, disconnect
from xtoken_services.queue.endpoint import Endpoint
from xtoken_services.queue.memory import MemoryTrimmer, freeze_gc
from xtoken_services.queue.waiting import Waiting, WaitingRequest

if TYPE_CHECKING:  # the queue of a run has neither
    from xtoken_services.queue.metrics import Metrics
    from xtoken_services.queue.write_ahead_log import WriteAheadLog

log = logging.getLogger("xtoken.queue")

# Silence is counted in seconds and ends sessions; the loop comes back more often, to waiting requests and to stop.
TICK_S = 0.25
RECEIVE_S = 0.1
SKIP_S = 0.1
"""How long the frames of an oversized message are received only to be dropped."""
# Messages of one turn of the loop: replies, retries and the signal to stop wait for no more than these.
BURST = 64
FAILED = "failed on this request, see its log"
MAX_PEERS = 1 << 16
UNKNOWN = -1
# In place of a descriptor, which the system gives to the next connection as soon as this one is closed.
DISCONNECTED = UNKNOWN, -math.inf
RETRY_S, RETRY_TURN_S = 0.005, 0.02
"""How long waiting requests are retried after a message, and in each turn of the loop, if there are so many."""
WITH_COLUMNS = (m.Put, m.Complete)
OWN_COPY_BYTES = 1 << 13
"""A received frame smaller than this shares its memory with others, all of which it would keep."""


class Server:
    """The queue server.

    Args:
        engine: State of the queue.
        address: Address to bind, see `Endpoint`.
        journal: Write-ahead log of every change.
        metrics: Its metrics, closed with it.

    Raises:
        XtokenError: The address is in use or cannot be bound.
        ConfigError: The address asks for a proof that is not there.
    """

    def __init__(
        self, engine: Engine, address: Address, *, journal: WriteAheadLog | None = None, metrics: Metrics | None = None
    ) -> None:
        self.engine = engine
        self.address = address
        self.metrics = metrics
        self._journal = journal
        self._endpoint = Endpoint(address, max_frame=engine.memory_limit, max_connections=connection_limit())
        self._guard = ConnectionGuard(
            self._endpoint.connections, engine.memory_limit + SPARE_BYTES, lambda: engine.nbytes + engine.budget.used
        )
        self._use_socket()
        self.waiting = Waiting(engine, self._retry)
        # Descriptor of each peer's connection, and when its first message was received.
        self._peers: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        self._outbox: list[tuple[bytes, m.Reply, Sequence[memoryview]]] = []
        self._memory = MemoryTrimmer(engine.nbytes)
        self._session_ended = False
        self._stop = False
        engine.waiting = lambda: len(self.waiting)
        engine.sessions.on_end.append(self._note_end)

    def stop(self) -> None:
        """Make `serve` return soon; safe to call from a signal handler."""
        self._stop = True

    def serve(self) -> None:
        """Answer requests until the server is stopped, then close the socket and remove its file."""
        # Once all that lives as long as the process is there, the objects of a replayed journal among it.
        freeze_gc()
        next_tick = time.monotonic()
        self._guard.start()
        try:
            while not self._stop:
                self._receive_burst()
                now = time.monotonic()
                if now >= next_tick:
                    self.engine.tick()
                    self._memory.check(self.engine.nbytes)
                    next_tick = now + TICK_S
                self._answer_waiting(now)
                self._send_out()
                if self.metrics is not None:
                    self.metrics.serve(self.engine)
        finally:
            self.close()

    def close(self) -> None:
        """Close the socket and remove its file."""
        self._guard.close()
        self._endpoint.close()
        if self.metrics is not None:
            self.metrics.close()
        if self._journal is not None:
            self._journal.close()

    def _use_socket(self) -> None:
        self._socket = self._endpoint.socket
        self._socket.rcvtimeo = int(RECEIVE_S * 1000)
        self._guard.connections = self._endpoint.connections

    def _answer_waiting(self, now: float) -> None:
        """Answer waiting requests that the end of a session concerns, then those whose time is over."""
        while self._session_ended:
            self._session_ended = False
            self.waiting.answer_ended_sessions()
            self.waiting.wake_all()
        # One last try: what it waited for may have come with the change that is retried at this moment.
        for entry in self.waiting.expired(now):
            if not self._answer(entry.peer, entry.request, waited=True):
                self._send(entry.peer, self.engine.answer_empty(entry.request), [])
        self.waiting.run(RETRY_TURN_S)

    def _receive_burst(self) -> None:
        """Answer the messages that are there, after waiting a tick for the first."""
        for _ in range(BURST):
            # Nothing is waited for while retries are due: the loop comes back to them first.
            if self._stop or (self.waiting.is_due and not readable(self._socket)):
                return
            try:
                frames = receive_frames(self._socket, 1 + MAX_FRAMES)
            except zmq.Again:
                self._guard.drained_at = time.monotonic()
                return
            except TooManyFramesError as error:
                self._drop_message(error.first)
                continue
            peer = frames[0].bytes
            if peer not in self._peers:
                self._remember_peer(peer, frames[0])
            number, since = self._peers[peer]
            # A client whose connection was cut sends again on a new one: its first copy must not be answered later.
            if since > self._guard.cut_at.get(number, 0.0):
                self._guard.heard[number] = time.monotonic()
                self._on_message(peer, frames[1:])
            if not readable(self._socket):
                self._guard.drained_at = time.monotonic()
                return

    def _drop_message(self, first: zmq.Frame) -> None:
        """Disconnect the sender of a message with too many frames, and drop what it has sent.

        No other message can be received before the end of this one. If that is far, the socket is replaced: all peers
        lose their connection, and repeat their requests on a new one.
        """
        self._remember_peer(first.bytes, first)
        self._disconnect(first.bytes, f"has sent a message of more than {MAX_FRAMES} frames")
        if skip_frames(self._socket, SKIP_S):
            return
        log.warning("a message has frames without end: replacing the socket, all peers must connect again")
        self._peers.clear()
        self._endpoint.renew()
        self._use_socket()

    def _on_message(self, peer: bytes, frames: Sequence[zmq.Frame]) -> None:
        header = frames[0].buffer if frames else memoryview(b"")
        try:
            request = m.decode_request(header)
        except QueueError as error:
            self._refuse(peer, m.envelope(header).id, error)
            return
        if len(frames) > 1 and not isinstance(request, WITH_COLUMNS):
            self._refuse(peer, request.id, QueueError("bad_request", f"a {type(request).__name__} has no columns"))
            return
        buffers: list[Buffer] = [f.bytes if len(f) < OWN_COPY_BYTES else f.buffer for f in frames[1:]]
        now = time.monotonic()
        if self._answer(peer, request, buffers):
            if self.metrics is not None:
                self.metrics.handled(request, time.monotonic() - now)
            # A client whose connection broke sends again on a new one; its first copy must not be answered too.
            self.waiting.discard(request)
            # Only a change can let a waiting request proceed.
            if type(request) not in READS:
                self.waiting.wake(request)
                if self.waiting.is_due:
                    self.waiting.run(RETRY_S)
            return
        try:
            wait_s = float(getattr(request, "wait_s", 0.0))
            evicted = self.waiting.add(WaitingRequest(peer, request, now + wait_s, now))
        except QueueError as error:
            self._refuse(peer, request.id, error)
            return
        for entry in evicted:
            self._send(entry.peer, m.Empty(id=entry.request.id), [])

    def _retry(self, entry: WaitingRequest) -> bool:
        """Try a waiting request again; False if it still has to wait."""
        done = self._answer(entry.peer, entry.request, waited=True)
        if done and self.metrics is not None:
            self.metrics.waited(entry.request, time.monotonic() - entry.since)
        return done

    def _answer(
        self, peer: bytes, request: m.AnyRequest, buffers: Sequence[Buffer] = (), *, waited: bool = False
    ) -> bool:
        """Answer a request; False if it has to wait."""
        try:
            response = self.engine.handle(request, buffers, waited=waited)
        except QueueError as error:
            self._refuse(peer, request.id, error)
            return True
        except XtokenError:
            raise
        except Exception as error:  # a fault in one request must not end the queue for all others
            log.exception("failed on a %s", type(request).__name__)
            self._refuse(peer, request.id, QueueError("bad_request", f"the queue {FAILED}: {error!r}"))
            return True
        if response is None:
            return False
        frames = response.frames()
        # A repeated or waiting request may share its reply object with another id.
        response.reply.id = request.id
        self._send(peer, response.reply, frames)
        return True

    def _refuse(self, peer: bytes, request_id: str, error: QueueError) -> None:
        log.debug("refused: %s: %s", error.code, error)
        if self.metrics is not None:
            self.metrics.refused(error.code)
        self._send(peer, m.Failure(id=request_id, code=error.code, message=str(error)[:4096], detail=error.detail), [])

    def _send(self, peer: bytes, reply: m.Reply, buffers: Sequence[memoryview]) -> None:
        """Send a reply; with a journal, at the end of the round."""
        if self._journal is not None:
            # A copy: the same reply may be sent again under another id before this round ends.
            self._outbox.append((peer, copy(reply), buffers))
        else:
            self._send_now(peer, reply, buffers)

    def _send_out(self) -> None:
        """Commit the journal once for all replies of the round, then send them."""
        if self._journal is not None and self._outbox:
            self._journal.commit()
            # Cleared first: a peer that is disconnected while these are sent adds nothing to them.
            held, self._outbox = self._outbox, []
            for peer, reply, buffers in held:
                self._send_now(peer, reply, buffers)

    def _send_now(self, peer: bytes, reply: m.Reply, buffers: Sequence[memoryview]) -> None:
        try:
            # Never blocks: with a full queue of replies `zmq.Again` is raised, and the peer is the one who pays.
            self._socket.send(peer, MORE_AT_ONCE)
            send_frames(self._socket, m.encode(reply), buffers)
        except zmq.Again:
            self._disconnect(peer, "does not read its replies")
        except zmq.ZMQError as error:
            log.debug("a peer disconnected before its reply: %s", error)
            self._peers[peer] = DISCONNECTED

    def _remember_peer(self, peer: bytes, frame: zmq.Frame) -> None:
        """Record the file descriptor of a peer's connection."""
        number = UNKNOWN
        with suppress(zmq.ZMQError):
            number = int(frame.get(zmq.SRCFD))
        self._peers[peer] = number, time.monotonic()
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)

    def _disconnect(self, peer: bytes, why: str) -> None:
        """Disconnect a peer; what it sent before may still come in, and is dropped."""
        number, _ = self._peers.get(peer, DISCONNECTED)
        if number == UNKNOWN:
            return
        self._peers[peer] = DISCONNECTED
        log.warning("disconnecting a peer (%s): it %s", address_of(number) or "ipc", why)
        disconnect(number)

    def _note_end(self, _session: str) -> None:
        self._session_ended = True
