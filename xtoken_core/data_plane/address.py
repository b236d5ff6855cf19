"""Where a queue is, and how one proves to belong there."""

from __future__ import annotations

import ipaddress
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from xtoken_core.errors import ConfigError, InputError

TOKEN_FILE_VARIABLE = "XTOKEN_QUEUE_TOKEN_FILE"
USER = b"xtoken"
IPC_PATH_BYTES = 107


@dataclass(frozen=True)
class Address:
    """A queue's address: `ipc://PATH` in a private directory, or `tcp://127.0.0.1:PORT` with a token.

    The token is presented in the ZMTP handshake (PLAIN), before the first message; it never stands in one.
    """

    url: str
    token_file: Path | None = None

    @classmethod
    def parse(cls, url: str, token_file: Path | None = None) -> Address:
        """Check an address; the token file may also be named by the environment.

        Raises:
            ConfigError: It is neither ipc nor loopback tcp.
        """
        parts = urlsplit(url)
        if parts.scheme == "ipc":
            if not 0 < len(os.fsencode(url.removeprefix("ipc://"))) <= IPC_PATH_BYTES:
                raise ConfigError(f"{url}: the path of an ipc address has 1 to {IPC_PATH_BYTES} bytes")
            return cls(url)
        if parts.scheme != "tcp" or not parts.hostname or not parts.port:
            raise ConfigError(f"{url!r} is no queue address: use ipc://PATH or tcp://127.0.0.1:PORT")
        if not _loopback(parts.hostname):
            raise ConfigError(f"{url}: only loopback addresses are served; {parts.hostname} is not one")
        named = os.environ.get(TOKEN_FILE_VARIABLE)
        return cls(url, token_file or (Path(named) if named else None))

    @property
    def ipc_path(self) -> Path | None:
        """The socket's file, if this is an ipc address."""
        return Path(self.url.removeprefix("ipc://")) if self.url.startswith("ipc://") else None

    def authenticate(self, socket: zmq.Socket[bytes]) -> None:
        """Make a client's socket present the token in its handshake.

        Raises:
            ConfigError: A tcp address needs a token file and none is named.
        """
        if self.ipc_path is not None:
            return
        if self.token_file is None:
            raise ConfigError(
                f"{self.url} needs the queue's token: name its file by --token-file or {TOKEN_FILE_VARIABLE}"
            )
        socket.plain_username = USER
        socket.plain_password = read_token(self.token_file).encode()


def read_token(path: Path) -> str:
    """The token in a file that only its owner may read.

    Raises:
        InputError: The file is missing, or others may read it.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise InputError(f"the token file {path} may be read by others: chmod 600 it")
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise InputError(f"cannot read the token file {path}: {error.strerror}") from error


def create_token(path: Path) -> str:
    """Write a new token to a 0600 file, or return the one that is there already."""
    if path.exists():
        return read_token(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_urlsafe(32)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token + "\n")
    return token


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
