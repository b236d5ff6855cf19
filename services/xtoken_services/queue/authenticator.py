"""Authentication of peers in the ZMTP handshake (ZAP, ZeroMQ RFC 27)."""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import zmq
import zmq.utils.z85

from xtoken_core.data_plane.keys import allowed_keys

log = logging.getLogger("xtoken.queue")

VERSION = b"1.0"
WELCOME, LATER, REFUSED = b"200", b"300", b"400"
"""Status codes: a peer that gets 300 is cut without an error and tries again."""

Check = Callable[[bytes, Sequence[bytes]], bool]
"""Takes the mechanism and the credentials; returns whether they are right."""


class Authenticator:
    """Answers libzmq's questions about connecting peers in a thread, which ends with the context.

    Args:
        context: Context of the server's socket.
        check: Checks a peer's credentials.
        is_full: Returns whether the peer's address has too many connections.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], check: Check, is_full: Callable[[str], bool]) -> None:
        self._check, self._is_full = check, is_full
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind("inproc://zeromq.zap.01")
        threading.Thread(target=self._answer, name="authenticator", daemon=True).start()

    def _answer(self) -> None:
        with suppress(zmq.ContextTerminated), self._socket:
            while True:
                self._socket.send_multipart(self._reply(self._socket.recv_multipart()))

    def _reply(self, question: Sequence[bytes]) -> list[bytes]:
        """Return the answer to one question; a failure refuses the peer: without an answer libzmq admits every key."""
        try:
            _version, _request, _domain, address, _identity, mechanism, *credentials = question
            status, text = self._status(address.decode("utf-8", "replace"), mechanism, credentials)
        except Exception:
            log.exception("cannot check a connecting peer, which is refused")
            status, text = REFUSED, b"the check has failed"
        return [VERSION, question[1] if len(question) > 1 else b"", status, text, b"", b""]

    def _status(self, address: str, mechanism: bytes, credentials: Sequence[bytes]) -> tuple[bytes, bytes]:
        # Before the credentials: a flood must not cost a comparison each, nor learn whether a key is right.
        if self._is_full(address):
            return LATER, b"too many connections"
        if self._check(mechanism, credentials):
            return WELCOME, b"OK"
        return REFUSED, b"wrong token or key"


def check_token(user: bytes, token: str) -> Check:
    """Return a check of PLAIN credentials."""

    def check(mechanism: bytes, credentials: Sequence[bytes]) -> bool:
        if mechanism != b"PLAIN" or len(credentials) != 2:
            return False
        # `&`, not `and`: both are compared in any case, so that time does not show which one is wrong.
        return hmac.compare_digest(credentials[0], user) & hmac.compare_digest(credentials[1], token.encode())

    return check


def check_key(keys: Path) -> Check:
    """Return a check of CURVE keys against a directory that is read at each handshake, so it can change at any time."""

    def check(mechanism: bytes, credentials: Sequence[bytes]) -> bool:
        if mechanism != b"CURVE" or len(credentials) != 1:
            return False
        return zmq.utils.z85.encode(credentials[0]) in allowed_keys(keys)

    return check
