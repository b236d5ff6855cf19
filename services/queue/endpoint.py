"""Socket of the queue: binding, and authentication in the handshake."""

from __future__ import annotations

import socket as sockets
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from xtoken_core.data_plane.address import USER, Address, create_token
from xtoken_core.data_plane.keys import allowed_keys, server_keys
from xtoken_core.errors import ConfigError, XtokenError

MAX_PENDING_REPLIES = 64
MAX_PENDING_REQUESTS = 64
HANDSHAKE_MS = 5000


class Endpoint:
    """Bound ROUTER socket.

    Args:
        address: `ipc://` in a private directory, loopback tcp with a token file (made if missing), or any tcp address
            with a directory of keys.
        max_frame: Largest frame in bytes; a peer that sends a longer one is disconnected.

    Raises:
        XtokenError: The address is in use or cannot be bound.
        ConfigError: The token file or keys that the address needs are missing.
    """

    def __init__(self, address: Address, *, max_frame: int) -> None:
        self.address = address
        self._context = zmq.Context()
        self._auth: ThreadAuthenticator | None = None
        try:
            self.socket = self._bind(max_frame)
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """Close the socket and remove its file."""
        self.socket.close(linger=0)
        self._end()
        if self.address.ipc_path is not None:
            self.address.ipc_path.unlink(missing_ok=True)

    def _bind(self, max_frame: int) -> zmq.Socket[bytes]:
        self._prepare()
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.MAXMSGSIZE, max_frame)
            socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
            socket.setsockopt(zmq.SNDHWM, MAX_PENDING_REPLIES)
            socket.setsockopt(zmq.RCVHWM, MAX_PENDING_REQUESTS)
            socket.linger = 0
            if self.address.keys is not None:
                socket.curve_publickey, socket.curve_secretkey = server_keys(self.address.keys)
                socket.curve_server = True
            elif self.address.ipc_path is None:
                socket.plain_server = True
            socket.bind(self.address.url)
        except BaseException as error:
            socket.close(linger=0)
            if not isinstance(error, zmq.ZMQError):
                raise
            what = "is in use: stop what listens there, or choose another" if error.errno == zmq.EADDRINUSE else error
            raise XtokenError(f"cannot serve at {self.address.url}: the address {what}") from error
        return socket

    def _prepare(self) -> None:
        address = self.address
        if address.ipc_path is not None:
            check_private(address.ipc_path)
            return
        self._auth = ThreadAuthenticator(self._context)
        self._auth.start()
        if address.keys is not None:
            server_keys(address.keys)
            self._auth.configure_curve_callback(domain="*", credentials_provider=AllowList(address.keys))
            return
        if address.token_file is None:
            raise ConfigError(f"{address.url} needs a token file: name one by --token-file, it is made if missing")
        self._auth.configure_plain(domain="*", passwords={USER.decode(): create_token(address.token_file)})

    def _end(self) -> None:
        if self._auth is not None:
            self._auth.stop()
        self._context.term()


class AllowList:
    """Client keys in a directory, read at each handshake, so that a key can be added or revoked at any time."""

    def __init__(self, keys: Path) -> None:
        self.keys = keys

    def callback(self, _domain: str, key: bytes) -> bool:
        """Return whether a client with this public key (Z85) may connect."""
        return key in allowed_keys(self.keys)


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
    probe = sockets.socket(sockets.AF_UNIX)
    try:
        probe.connect(str(path))
    except OSError:
        return
    finally:
        probe.close()
    raise XtokenError(f"cannot serve at ipc://{path}: the address is in use: stop what listens there")
