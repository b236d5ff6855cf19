"""Attacks by peers without a token: connections to the queue that never finish their handshake."""

import random
import socket
import time
from contextlib import suppress

from tests.attack.target import Attack, Target

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32)
CONNECTIONS = 300


def half_handshakes(target: Target, rng: random.Random, seconds: float) -> None:
    """Hold connections that stop in the middle of the handshake."""
    held, end = [], time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            while len(held) < CONNECTIONS:
                with suppress(OSError):
                    held.append(socket.create_connection(("127.0.0.1", target.queue_port), timeout=5))
                    held[-1].sendall(GREETING[: rng.randrange(1 + len(GREETING))])
            time.sleep(0.2)
            gone, held = held, []
            for one in gone:
                try:
                    one.setblocking(False)
                    one.recv(4096)
                    held.append(one)
                except BlockingIOError:
                    held.append(one)
                except OSError:
                    one.close()
    finally:
        for one in held:
            one.close()


def random_bytes(target: Target, rng: random.Random, seconds: float) -> None:
    """Send bytes that are no handshake to the queue's port and to the control plane's."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for address in (("127.0.0.1", target.queue_port), target.http_address):
            with suppress(OSError), socket.create_connection(address, timeout=5) as raw:
                raw.sendall(rng.choice((b"", GREETING, b"GET / HTTP/1.1\r\n")) + rng.randbytes(rng.randrange(3000)))
        time.sleep(0.002)


ATTACKS: dict[str, Attack] = {f"connections.{attack.__name__}": attack for attack in (half_handshakes, random_bytes)}
