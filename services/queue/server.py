"""The engine behind a ROUTER socket: decode, answer or park, send; nothing here knows what the messages mean."""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from copy import copy

import zmq

from services.queue.connection_guard import SPARE_BYTES, Guard, cut
from services.queue.endpoint import Endpoint
from services.queue.memory import Returned, settle
from services.queue.metrics import Exporter, Latencies, prometheus_text
from services.queue.waiting import Parked, Waiting
from services.queue.write_ahead_log import WriteAheadLog
from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.frames import MORE_AT_ONCE, readable, receive_frames, send_frames
from xtoken_core.errors import XtokenError
from xtoken_core.queue.engine import READS, Engine
from xtoken_core.queue.stats import stats_document
from xtoken_core.wire import QueueError
from xtoken_core.wire import messages as m
from xtoken_core.wire.columns import Buffer

log = logging.getLogger("xtoken.queue")

TICK_S = 0.25
LOOK_S = 0.1
BURST = 64
FAILED = "failed on this request, see its log"
PEERS_KNOWN = 1 << 16
CUT = -1
OWN_COPY_BYTES = 1 << 13
"""A received frame smaller than this shares its memory with others, all of which it would keep."""


class Server:
    """The queue server.

    Args:
        engine: What answers.
        address: Where to bind, see `Endpoint`.
        journal: What every change is written to before it is answered.
        metrics_port: Loopback port of `/metrics`; 0 takes any free one, None serves none.

    Raises:
        XtokenError: The address is in use or cannot be bound.
        ConfigError: The address asks for a proof that is not there.
    """

    def __init__(
        self, engine: Engine, address: Address, *, journal: WriteAheadLog | None = None, metrics_port: int | None = None
    ) -> None:
        self.engine = engine
        self.address = address
        self.latencies = Latencies()
        self._journal = journal
        self.exporter = None if metrics_port is None else Exporter(metrics_port)
        self._endpoint = Endpoint(address, max_frame=engine.memory_limit)
        self._socket = self._endpoint.socket
        self._socket.rcvtimeo = int(LOOK_S * 1000)
        self._guard = Guard(self._socket, engine.memory_limit + SPARE_BYTES, BURST, engine.nbytes)
        self.waiting = Waiting(engine, self._answer_parked)
        self._peers: OrderedDict[bytes, int] = OrderedDict()
        self._heard: set[bytes] = set()
        self._outbox: list[tuple[bytes, m.Reply, Sequence[memoryview]]] = []
        self._memory = Returned(engine.nbytes)
        self._ended = False
        self._stop = False
        engine.waiting = lambda: len(self.waiting)
        engine.sessions.on_end.append(self._session_ended)

    def stop(self) -> None:
        """Leave `serve` soon; safe to call from a signal handler."""
        self._stop = True

    def serve(self) -> None:
        """Answer until stopped, then close the socket and remove its file."""
        settle()
        next_tick = next_look = time.monotonic()
        try:
            while not self._stop:
                self._receive_burst()
                now = time.monotonic()
                if now >= next_tick:
                    self.engine.tick()
                    self._memory.look(self.engine.nbytes)
                    next_tick = now + TICK_S
                self._settle(now)
                self._send_out()
                if now >= next_look:
                    self._look()
                    next_look = now + LOOK_S
                if self.exporter is not None:
                    self.exporter.serve_pending(self._metrics)
        finally:
            self.close()

    def close(self) -> None:
        """Close the socket and remove its file."""
        self._guard.close()
        self._endpoint.close()
        if self.exporter is not None:
            self.exporter.close()
        if self._journal is not None:
            self._journal.close()

    def _look(self) -> None:
        """Tell the guard who was heard, and let it act."""
        for peer in self._heard:
            self._guard.heard(self._peers.get(peer, CUT))
        self._heard.clear()
        self._guard.look(self.engine.nbytes)

    def _metrics(self) -> str:
        return prometheus_text(json.loads(stats_document(self.engine)), self.latencies)

    def _settle(self, now: float) -> None:
        """Answer those whom the end of a session concerns, then those whose time is over."""
        while self._ended:
            self._ended = False
            self.waiting.of_ended_sessions()
            self.waiting.wake_all()
        for entry in self.waiting.expired(now):
            if not self._answer(entry.peer, entry.request, entry.buffers, waited=True):
                self._send(entry.peer, m.Empty(id=entry.request.id), [])

    def _receive_burst(self) -> None:
        """Answer what is there, after waiting a tick for the first."""
        for _ in range(BURST):
            try:
                frames = receive_frames(self._socket)
            except zmq.Again:
                return
            peer = frames[0].bytes
            if peer not in self._peers:
                self._meet(peer, frames[0])
            self._heard.add(peer)
            self._on_message(peer, frames[1:])
            if not readable(self._socket):
                return

    def _on_message(self, peer: bytes, frames: Sequence[zmq.Frame]) -> None:
        header = frames[0].buffer if frames else memoryview(b"")
        try:
            request = m.decode_request(header)
        except QueueError as error:
            self._refuse(peer, m.envelope(header).id, error)
            return
        buffers: list[Buffer] = [f.bytes if len(f) < OWN_COPY_BYTES else f.buffer for f in frames[1:]]
        now = time.monotonic()
        if self._answer(peer, request, buffers):
            self.latencies.note(request, time.monotonic() - now)
            if type(request) not in READS:
                self.waiting.wake(request)
            return
        try:
            wait_s = float(getattr(request, "wait_s", 0.0))
            self.waiting.park(Parked(peer, request, buffers, now + wait_s, now))
        except QueueError as error:
            self._refuse(peer, request.id, error)

    def _answer_parked(self, entry: Parked) -> bool:
        done = self._answer(entry.peer, entry.request, entry.buffers, waited=True)
        if done:
            self.latencies.note_wait(entry.request, time.monotonic() - entry.since)
        return done

    def _answer(self, peer: bytes, request: m.AnyRequest, buffers: list[Buffer], *, waited: bool = False) -> bool:
        """Answer a request; False if it has to wait."""
        try:
            answer = self.engine.handle(request, buffers, waited=waited)
        except QueueError as error:
            self._refuse(peer, request.id, error)
            return True
        except XtokenError:
            raise
        except Exception as error:  # one request must not end the queue for all others
            log.exception("failed on a %s", type(request).__name__)
            self._refuse(peer, request.id, QueueError("bad_request", f"the queue {FAILED}: {error!r}"))
            return True
        if answer is None:
            return False
        frames = answer.frames()
        answer.reply.id = request.id
        self._send(peer, answer.reply, frames)
        return True

    def _refuse(self, peer: bytes, request_id: str, error: QueueError) -> None:
        log.debug("refused: %s: %s", error.code, error)
        self.latencies.note_refusal(error.code)
        self._send(peer, m.Failure(id=request_id, code=error.code, message=str(error)[:4096], detail=error.detail), [])

    def _send(self, peer: bytes, reply: m.Reply, buffers: Sequence[memoryview]) -> None:
        """Send a reply; with a journal that is flushed before each answer, at the end of the round."""
        if self._journal is not None and self._journal.always:
            self._outbox.append((peer, copy(reply), buffers))
        else:
            self._send_now(peer, reply, buffers)

    def _send_out(self) -> None:
        """Flush the journal once for all answers of the round, then send them."""
        if self._journal is not None and self._outbox:
            self._journal.sync()
            held, self._outbox = self._outbox, []
            for peer, reply, buffers in held:
                self._send_now(peer, reply, buffers)

    def _send_now(self, peer: bytes, reply: m.Reply, buffers: Sequence[memoryview]) -> None:
        try:
            self._socket.send(peer, MORE_AT_ONCE)
            send_frames(self._socket, m.encode(reply), buffers)
        except zmq.Again:
            self._disconnect(peer)
        except zmq.ZMQError as error:
            log.debug("a peer has gone before its reply, and will ask again: %s", error)
            self._peers.pop(peer, None)

    def _meet(self, peer: bytes, frame: zmq.Frame) -> None:
        """Remember which file descriptor a peer's connection has."""
        with suppress(zmq.ZMQError):
            self._peers[peer] = int(frame.get(zmq.SRCFD))
        if len(self._peers) > PEERS_KNOWN:
            self._peers.popitem(last=False)

    def _disconnect(self, peer: bytes) -> None:
        """Cut a peer that does not take its replies; what it has sent before may still come in."""
        number = self._peers.get(peer, CUT)
        if number == CUT:
            return
        self._peers[peer] = CUT
        log.warning("a peer does not take its replies: it is disconnected")
        cut(number)

    def _session_ended(self, _session: str) -> None:
        self._ended = True
