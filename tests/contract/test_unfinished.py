"""What a peer that has passed the handshake can make the queue hold: messages without an end, answers unread."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import msgpack
import psutil
import pytest

from tests.contract.attacker import Attacker
from tests.contract.peers import Place, ints
from tests.contract.processes import ipc_address, queue_process, tcp_address
from xtoken_core.data_plane.address import Address
from xtoken_services.queue.connection_guard import HELD_FACTOR, SPARE_BYTES

MEMORY = 32 << 20
BETWEEN_LOOKS = 160 << 20
"""What may come in before the queue looks again; the sum over all attackers, on a busy machine."""
HELLO = {"type": "hello", "id": "a.1", "versions": [2], "name": "deaf", "role": "r", "incarnation": 1}


@contextmanager
def watched(address: Address) -> Iterator[tuple[Callable[[], int], Callable[[], int]]]:
    """A queue process: by how much it has grown at most, and by how much it is larger now."""
    with queue_process(address, "--memory-limit", str(MEMORY)) as process:
        seen, over = psutil.Process(process.pid), threading.Event()
        first = seen.memory_info().rss
        most = [first]

        def watch() -> None:
            while not over.wait(0.005):
                most.append(seen.memory_info().rss)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield lambda: max(most) - first, lambda: seen.memory_info().rss - first
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize(
    ("transport", "frame"),
    [
        pytest.param("tcp", 1 << 20, marks=pytest.mark.slow),
        pytest.param("ipc", 1 << 16, marks=pytest.mark.slow),
        ("ipc", 200),
    ],
)
def test_a_message_without_an_end_is_cut(short_tmp: Path, transport: str, frame: int) -> None:
    make = tcp_address if transport == "tcp" else ipc_address
    directory = short_tmp / f"u-{transport}{frame}"
    directory.mkdir(mode=0o700)
    address = make(directory)
    with watched(address) as (grown, _):
        place = Place("library", address=address)
        idle, busy = place.worker(), place.worker()
        for peer in (idle, busy):
            peer.call("open", partition="p", tasks=[{"name": "a", "requires": ["x"]}])
        attackers = [Attacker(address) for _ in range(2)]
        floods = [threading.Thread(target=a.flood, args=(1 << 30,), kwargs={"frame": frame}) for a in attackers]
        for flood in floods:
            flood.start()
        number = 0
        while any(flood.is_alive() for flood in floods):
            busy.call("put", partition="p", ids=[number], columns={"x": ints([number])})
            assert busy.call("claim", partition="p", task="a", count=1)["ids"] == [number]
            busy.call("ack", partition="p", task="a", ids=[number])
            number += 1
        assert all(attacker.cut() for attacker in attackers)
        assert number > 0
        assert idle.call("put", partition="p", ids=[number], columns={"x": ints([7])})["type"] == "stored"
        place.leave()
        assert grown() < MEMORY + SPARE_BYTES + BETWEEN_LOOKS
        for attacker in attackers:
            attacker.close()


@pytest.mark.parametrize(("idle", "parts", "part"), [(1000, 4, 1 << 30), (0, 600, 1 << 20)])
def test_parts_of_messages_are_cut_beside_idle_connections(short_tmp: Path, idle: int, parts: int, part: int) -> None:
    """Many connections take the queue no longer to notice, and need not be sending any more."""
    address = ipc_address(short_tmp / f"u-{idle}")
    with watched(address) as (grown, _), ExitStack() as stack:
        waiting = [stack.enter_context(closing(Attacker(address))) for _ in range(idle)]
        place = Place("library", address=address)
        busy = place.worker()
        busy.call("open", partition="p", tasks=[{"name": "a", "requires": ["x"]}])
        attackers = [stack.enter_context(closing(Attacker(address))) for _ in range(parts)]
        for number, attacker in enumerate(attackers):
            attacker.flood(part)
            busy.call("put", partition="p", ids=[number], columns={"x": ints([number])})
        place.leave()
        assert any(attacker.cut(0.01) for attacker in attackers)
        assert sum(not one.cut(0.001) for one in waiting) >= idle / 2
        assert grown() < MEMORY + SPARE_BYTES + BETWEEN_LOOKS


def test_unread_replies_are_dropped(short_tmp: Path) -> None:
    """Rows in another order than they were put are copied for each answer; one peer may have 64 of these."""
    address = ipc_address(short_tmp / "u-deaf")
    with watched(address) as (grown, now):
        place = Place("library", address=address)
        peer = place.worker()
        peer.call("open", partition="p", tasks=[{"name": "a", "requires": ["x"]}])
        rows = [bytes([i]) * (1 << 20) for i in range(20)]
        peer.call("put", partition="p", ids=list(range(20)), columns={"x": ("jagged", "uint8", (), rows)})
        deaf = Attacker(address)
        deaf.send(msgpack.packb(HELLO), more=False)
        deaf.socket.settimeout(10)
        reply = deaf.socket.recv(4096)
        session = msgpack.unpackb(reply[2:])["session"]
        get = {"type": "get", "session": session, "partition": "p", "ids": list(range(19, -1, -1)), "fields": ["x"]}
        for number in range(60):
            deaf.send(msgpack.packb({**get, "id": f"b{number}"}), more=False)
        deadline = time.monotonic() + 20
        while not deaf_is_cut(deaf):
            assert time.monotonic() < deadline
            found = peer.call("get", partition="p", ids=[19, 3], fields=["x"])
            assert found["columns"]["x"][3] == [rows[19], rows[3]]
        while now() > len(rows) * len(rows[0]) * HELD_FACTOR + MEMORY + SPARE_BYTES:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert grown() > now()
        place.leave()
        deaf.close()


def deaf_is_cut(deaf: Attacker) -> bool:
    """Whether its connection is closed for sending, found out without reading."""
    try:
        deaf.send(b"", more=False)
    except OSError:
        return True
    return False
