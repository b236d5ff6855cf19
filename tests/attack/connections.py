"""Attacks by peers without a token: connections to the queue that never finish their handshake, or fail it."""

import random
import socket
import time
from contextlib import suppress

from tests.attack.target import Attack, FaultError, Target
from xtoken_core.compat.task_client import TaskClient
from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.zmq_transport import ZmqTransport
from xtoken_core.errors import XtokenError

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32)
CONNECTIONS = 300
ANSWER_S = 1.0


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


def wrong_token(target: Target, rng: random.Random, seconds: float) -> None:
    """Use a client with a wrong token.

    Raises:
        FaultError: It is accepted, or learns of its mistake later than a second.
    """
    wrong = target.scratch("token") / "token"
    wrong.write_text(rng.randbytes(16).hex() + "\n")
    wrong.chmod(0o600)
    client = TaskClient(ZmqTransport(Address.parse(target.queues[1].url, wrong), patience_s=seconds))
    began = target.clock.now()
    try:
        client.hello("intruder", "library", incarnation=time.time_ns())
    except XtokenError as error:
        waited = target.clock.since(began)
        if waited > ANSWER_S:
            raise FaultError(f"a wrong token was reported after {waited:.1f} s: {error}") from error
        return
    finally:
        client.close()
    raise FaultError("a wrong token is accepted")


ATTACKS: dict[str, Attack] = {
    f"connections.{attack.__name__}": attack for attack in (half_handshakes, random_bytes, wrong_token)
}
