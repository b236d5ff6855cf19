"""An authenticated peer that speaks ZMTP 3.0 by hand: unlike libzmq it can leave a message unfinished."""

import socket
import struct
import time
from contextlib import suppress

from xtoken_core.data_plane.address import Address

MORE, LONG, COMMAND = 1, 2, 4
CHUNK = 1 << 20


class Attacker:
    """A connection that has passed the handshake (NULL on ipc, PLAIN on tcp) and sends what it likes."""

    def __init__(self, address: Address) -> None:
        if address.ipc_path is not None:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(str(address.ipc_path))
            self._greet(b"NULL")
            self._command(b"\x05READY" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b""))
            self._read_command()
            return
        token = address.token_file.read_text().strip().encode()
        self.socket = socket.create_connection(("127.0.0.1", int(address.url.rsplit(":", 1)[1])))
        self._greet(b"PLAIN")
        self._command(b"\x05HELLO" + bytes([6]) + b"xtoken" + bytes([len(token)]) + token)
        self._read_command()
        self._command(b"\x08INITIATE" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b""))
        self._read_command()

    def send(self, body: bytes, *, more: bool) -> None:
        """One frame."""
        self.begin(len(body), more=more)
        self.socket.sendall(body)

    def begin(self, nbytes: int, *, more: bool = True) -> None:
        """What comes before the bytes of a frame."""
        flags = MORE if more else 0
        self.socket.sendall(struct.pack(">BQ", flags | LONG, nbytes) if nbytes > 255 else bytes([flags, nbytes]))

    def flood(self, nbytes: int, *, frame: int = CHUNK, seconds: float = 30.0) -> int:
        """Send one message that never ends, until so many bytes are sent or the queue has cut it; returns how many."""
        body, sent, end = bytes(frame), 0, time.monotonic() + seconds
        self.socket.settimeout(seconds)
        with suppress(OSError):
            while sent < nbytes and time.monotonic() < end:
                self.send(body, more=True)
                sent += frame
        return sent

    def cut(self, seconds: float = 5.0) -> bool:
        """Whether the queue has closed the connection."""
        self.socket.settimeout(seconds)
        try:
            while self.socket.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        """Leave."""
        self.socket.close()

    def _greet(self, mechanism: bytes) -> None:
        self.socket.settimeout(10)
        self.socket.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32))
        self._read(64)

    def _command(self, body: bytes) -> None:
        self.socket.sendall(bytes([COMMAND, len(body)]) + body)

    def _read_command(self) -> bytes:
        flags, length = self._read(2)
        body = self._read(length)
        if not flags & COMMAND or body.startswith(b"\x05ERROR"):
            raise ConnectionError(f"the handshake failed: {body!r}")
        return body

    def _read(self, count: int) -> bytes:
        body = b""
        while len(body) < count:
            part = self.socket.recv(count - len(body))
            if not part:
                raise ConnectionError("the queue has closed the connection")
            body += part
        return body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
