"""Socket of the queue: binding, and authentication in the handshake."""

from __future__ import annotations

import socket as sockets
import time
from pathlib import Path

import zmq

from xtoken_core.data_plane.address import USER, Address, create_token
from xtoken_core.data_plane.keys import server_keys
from xtoken_core.errors import ConfigError, XtokenError
from xtoken_core.wire.bounds import HANDSHAKE_S
from xtoken_services.queue.authenticator import Authenticator, Check, check_key, check_token
from xtoken_services.queue.connections import Connections

MAX_PENDING_REPLIES = 64
MAX_PENDING_REQUESTS = 64
REBIND_S = 5.0


class Endpoint:
    """Bound ROUTER socket and its connections.

    Args:
        address: `ipc://` in a private directory, loopback tcp with a token file (made if missing), or any tcp address
            with a directory of keys.
        max_frame: Largest frame in bytes; a peer that sends a longer one is disconnected.
        max_connections: Connections at most.

    Raises:
        XtokenError: The address is in use or cannot be bound.
        ConfigError: The token file or keys that the address needs are missing.
    """

    def __init__(self, address: Address, *, max_frame: int, max_connections: int) -> None:
        self.address = address
        self._max_frame, self._max_connections = max_frame, max_connections
        self._context = zmq.Context()
        try:
            check = self._prepare()
            if check is not None:  # before the socket is bound: without it, CURVE would admit any key
                Authenticator(self._context, check, lambda peer: self.connections.is_full(peer))
            self._bind(deadline=0.0)
        except BaseException:
            self._context.term()
            raise

    def close(self) -> None:
        """Close the socket and remove its file."""
        self._close_socket()
        self._context.term()
        if self.address.ipc_path is not None:
            self.address.ipc_path.unlink(missing_ok=True)

    def renew(self) -> None:
        """Replace the socket by a new one at the same address, which drops all connections and what they have sent.

        Raises:
            XtokenError: The address cannot be bound again.
        """
        self._close_socket()
        self._bind(deadline=time.monotonic() + REBIND_S)

    def _close_socket(self) -> None:
        self.connections.close()
        self.socket.close(linger=0)

    def _bind(self, deadline: float) -> None:
        """Bind a new socket; retry until a deadline (monotonic clock), as a thread of libzmq closes the old one."""
        self.socket = self._create()
        self.connections = Connections(self.socket, self._max_connections)
        try:
            while not self._try_bind(deadline):
                time.sleep(0.002)
        except BaseException:
            self._close_socket()
            raise

    def _try_bind(self, deadline: float) -> bool:
        try:
            self.socket.bind(self.address.url)
        except zmq.ZMQError as error:
            in_use = error.errno == zmq.EADDRINUSE
            if in_use and time.monotonic() < deadline:
                return False
            what = "is in use: stop what listens there, or choose another" if in_use else error
            raise XtokenError(f"cannot serve at {self.address.url}: the address {what}") from error
        return True

    def _create(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        # Otherwise a reply to a peer that is gone is dropped in silence, and one to a full peer too.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_frame)
        # A peer that connects and sends nothing holds a descriptor: not for long.
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        socket.setsockopt(zmq.SNDHWM, MAX_PENDING_REPLIES)
        socket.setsockopt(zmq.RCVHWM, MAX_PENDING_REQUESTS)
        socket.setsockopt(zmq.IPV6, int(self.address.is_ipv6))
        socket.linger = 0
        if self.address.keys is not None:
            socket.curve_publickey, socket.curve_secretkey = server_keys(self.address.keys)
            socket.curve_server = True
        elif self.address.ipc_path is None:
            socket.plain_server = True
        return socket

    def _prepare(self) -> Check | None:
        """Return the check of credentials; None at an ipc address, which only its owner can reach."""
        address = self.address
        if address.ipc_path is not None:
            check_private(address.ipc_path)
            return None
        if address.keys is not None:
            server_keys(address.keys)
            return check_key(address.keys)
        if address.token_file is None:
            raise ConfigError(f"{address.url} needs a token file: name one by --token-file, it is made if missing")
        return check_token(USER, create_token(address.token_file))


def check_private(path: Path) -> None:
    """Check that the socket's directory is private and the path is not in use.

    Raises:
        XtokenError: Another process listens there, or the directory is missing.
        ConfigError: Other users may enter the directory.
    """
    try:
        mode = path.parent.stat().st_mode
    except OSError as error:
        raise XtokenError(f"cannot serve at ipc://{path}: {path.parent}: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError(f"the directory {path.parent} of the queue's socket must be private: chmod 700 it")
    # libzmq would unlink and take over the file of a living queue; only a connection shows whether one listens.
    probe = sockets.socket(sockets.AF_UNIX)
    try:
        probe.connect(str(path))
    except OSError:
        return
    finally:
        probe.close()
    raise XtokenError(f"cannot serve at ipc://{path}: the address is in use: stop what listens there")
