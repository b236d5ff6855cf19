"""Address of a queue, and authentication of its clients."""

from __future__ import annotations

import ipaddress
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from xtoken_core.data_plane.keys import client_keys
from xtoken_core.errors import ConfigError, InputError
from xtoken_core.regular_files import access_of_others, open_regular

TOKEN_FILE_VARIABLE = "XTOKEN_QUEUE_TOKEN_FILE"
KEYS_VARIABLE = "XTOKEN_QUEUE_KEYS"
USER = b"xtoken"
IPC_PATH_BYTES = 107


@dataclass(frozen=True)
class Address:
    """Address of a queue with the credentials for it.

    `ipc://PATH` in a private directory needs none; `tcp://` on loopback needs the queue's token (PLAIN); any `tcp://`
    works with keys (CURVE). Credentials travel in the ZMTP handshake, never in a message.

    Attributes:
        url: `ipc://PATH` or `tcp://HOST:PORT`.
        token_file: File with the queue's token.
        keys: Directory of keys, see `xtoken_core.data_plane.keys`.
    """

    url: str
    token_file: Path | None = None
    keys: Path | None = None

    @classmethod
    def parse(cls, url: str, token_file: Path | None = None, keys: Path | None = None) -> Address:
        """Validate an address; token file and keys may also be named by the environment.

        Raises:
            ConfigError: It is neither ipc nor tcp, or is not loopback and has no keys.
        """
        if url.startswith("ipc://"):
            if not 0 < len(os.fsencode(url.removeprefix("ipc://"))) <= IPC_PATH_BYTES:
                raise ConfigError(f"{url}: the path of an ipc address has 1 to {IPC_PATH_BYTES} bytes")
            return cls(url)
        try:
            parts = urlsplit(url)
            host = parts.hostname if parts.scheme == "tcp" and parts.port else None
        except ValueError:  # brackets that do not hold an IPv6 address, or a port that is no number
            host = None
        if not host:
            raise ConfigError(f"{url!r} is not a queue address: use ipc://PATH or tcp://127.0.0.1:PORT")
        keys = keys or (None if token_file else _named(KEYS_VARIABLE))
        token_file = token_file or (None if keys else _named(TOKEN_FILE_VARIABLE))
        if not is_loopback(host) and keys is None:
            raise ConfigError(
                f"{url}: a token would cross the network in clear; beyond loopback a directory of keys is needed: "
                f"name it by --keys or {KEYS_VARIABLE}"
            )
        if keys is not None and token_file is not None:
            raise ConfigError(f"{url}: a token file and keys are both given: use one of them")
        return cls(url, token_file, keys)

    @property
    def ipc_path(self) -> Path | None:
        """Return the socket's file, if this is an ipc address."""
        return Path(self.url.removeprefix("ipc://")) if self.url.startswith("ipc://") else None

    @property
    def is_ipv6(self) -> bool:
        """Return whether this is an IPv6 address, which libzmq accepts with an option of the socket only."""
        return ":" in (urlsplit(self.url).hostname or "")

    def authenticate(self, socket: zmq.Socket[bytes]) -> None:
        """Set the credentials that a client's socket presents in its handshake.

        Raises:
            ConfigError: A tcp address needs a token file or keys and none are named.
            InputError: They cannot be read.
        """
        if self.ipc_path is not None:
            return
        if self.keys is not None:
            socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = client_keys(self.keys)
            return
        if self.token_file is None:
            raise ConfigError(
                f"{self.url} needs the queue's token: name its file by --token-file or {TOKEN_FILE_VARIABLE}"
            )
        socket.plain_username = USER
        socket.plain_password = read_token(self.token_file).encode()


def read_token(path: Path) -> str:
    """Read the token in a file that only its owner may read.

    Raises:
        InputError: The file is missing, others may read it, or it holds no token.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            # Of the open file: its name could lead to another one by now.
            if access_of_others(os.fstat(file.fileno())):
                raise InputError(f"the token file {path} may be read by others: chmod 600 it")
            token = file.read(4096).decode("ascii").strip()
    except OSError as error:
        raise InputError(f"cannot read the token file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"the token file {path} is not ASCII text: it is no token") from error
    if not token:  # it would admit clients without one
        raise InputError(f"the token file {path} is empty: remove it, and a new one is made")
    return token


def create_token(path: Path) -> str:
    """Return the token of a file, which is created with mode 0600 if it is missing."""
    if path.exists():
        return read_token(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = secrets.token_urlsafe(32)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(token + "\n")
    try:
        path.hardlink_to(partial)  # unlike a rename it fails if another process was first
    except FileExistsError:
        return read_token(path)
    finally:
        partial.unlink()
    return token


def _named(variable: str) -> Path | None:
    named = os.environ.get(variable)
    return Path(named) if named else None


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback one."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
