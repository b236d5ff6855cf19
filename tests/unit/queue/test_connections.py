"""The bound of the connections of one address."""

import socket
from collections.abc import Iterator

import pytest
import zmq

from tests.support.waiting import until
from xtoken_services.queue import connections
from xtoken_services.queue.connections import Connections

MOST = 8
"""Connections at most; another machine may have a quarter of them."""


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    bound = context.socket(zmq.ROUTER)
    bound.bind("tcp://127.0.0.1:0")
    yield bound
    bound.close(linger=0)
    context.term()


@pytest.mark.parametrize(
    ("address", "left"),
    [("10.0.0.7", 2), ("::ffff:10.0.0.7", 2), ("127.0.0.1", 6), ("::ffff:127.0.0.1", 6), ("::1", 6), ("", 6)],
)
def test_another_machine_has_a_quarter_of_the_connections_and_its_newest_stay(
    router: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch, address: str, left: int
) -> None:
    monkeypatch.setattr(connections, "address_of", lambda number: address)
    followed = Connections(router, MOST)
    host, port = router.last_endpoint.decode().removeprefix("tcp://").split(":")
    peers = [socket.create_connection((host, int(port)), timeout=20) for _ in range(6)]
    try:
        for peer in peers[: 6 - left]:
            while peer.recv(100):  # to the end: the server closes it
                pass
        until(lambda: len(followed.open()) == left)
        assert all(peer.recv(1) for peer in peers[6 - left :]), "they are greeted"
    finally:
        for peer in peers:
            peer.close()
        followed.close()
