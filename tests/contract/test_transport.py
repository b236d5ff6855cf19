"""What only a real socket can show: bytes that are no message, peers that are not wanted, connections that break."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from tests.contract import reference_client
from tests.contract.peers import Place, ints
from tests.contract.processes import ipc_address, queue_process, queue_thread, start_queue, tcp_address
from tests.contract.reference_client import RefusedError, UnreachableError
from xtoken_core.compat.task_client import TaskClient
from xtoken_core.data_plane.address import Address, create_token, read_token
from xtoken_core.data_plane.zmq_transport import ZmqTransport
from xtoken_core.errors import ConfigError, InputError, QueueUnreachableError, XtokenError
from xtoken_core.queue.any_partition import any_partition
from xtoken_core.queue.engine import Engine
from xtoken_core.wire import Column, pack_columns
from xtoken_core.wire import messages as m
from xtoken_services.queue.server import Server

ANSWER_MS = 10_000
TASKS = [{"name": "a", "requires": ["x"]}]


@contextmanager
def dealer(address: Address, *, holds: int = 1000) -> Iterator[zmq.Socket[bytes]]:
    """A bare socket, authenticated, that takes up to `holds` replies which nobody has read."""
    context = zmq.Context()
    bare = context.socket(zmq.DEALER)
    bare.rcvhwm = holds
    address.authenticate(bare)
    bare.connect(address.url)
    try:
        yield bare
    finally:
        context.destroy(linger=0)


def ask(bare: zmq.Socket[bytes], *frames: bytes) -> dict[str, Any]:
    bare.send_multipart(frames)
    assert bare.poll(ANSWER_MS), "no answer"
    reply: dict[str, Any] = msgpack.unpackb(bare.recv_multipart()[0], strict_map_key=False)
    return reply


@pytest.fixture(params=["library", "reference"])
def tcp_place(request: pytest.FixtureRequest, tcp_queue: Address) -> Iterator[Place]:
    place = Place(request.param, address=tcp_queue)
    yield place
    place.leave()


HELLO = {"type": "hello", "id": "a.1", "versions": [2], "name": "w", "role": "r", "incarnation": 1}
BAD = {
    "empty": (b"", "bad_frame"),
    "no-msgpack": (b"\xc1", "bad_frame"),
    "cut-short": (msgpack.packb(HELLO)[:-3], "bad_frame"),
    "trailing-bytes": (msgpack.packb(HELLO) + b"\0", "bad_frame"),
    "a-list": (msgpack.packb([1, 2]), "bad_request"),
    "no-type": (msgpack.packb({"id": "a.1"}), "bad_request"),
    "unknown-type": (msgpack.packb({"type": "dance", "id": "a.1"}), "unknown_message"),
    "unknown-key": (msgpack.packb({**HELLO, "colour": 1}), "bad_request"),
    "no-id": (msgpack.packb({k: v for k, v in HELLO.items() if k != "id"}), "bad_request"),
    "wrong-type": (msgpack.packb({**HELLO, "rank": "first"}), "bad_request"),
    "out-of-bounds": (msgpack.packb({**HELLO, "incarnation": -1}), "bad_request"),
    "a-reply": (msgpack.packb({"type": "ok", "id": "a.1"}), "unknown_message"),
    "version": (msgpack.packb({**HELLO, "versions": [3, 9]}), "unsupported_version"),
    "extension": (msgpack.packb({**HELLO, "name": msgpack.ExtType(5, b"x")}), "bad_request"),
    "deep": (b"\x91" * 100_000 + b"\xc0", "bad_request"),
    "deep-inside": (b"\x82\xa4type\xa5stats\xa3zzz" + b"\x91" * 100_000 + b"\xc0", "bad_request"),
    "long-name": (msgpack.packb({**HELLO, "name": "n" * 129}), "bad_request"),
    "array-bomb": (b"\x81\xa3ids\xdd\xff\xff\xff\xff", "bad_frame"),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_messages_get_error_codes(tcp_queue: Address, name: str) -> None:
    header, code = BAD[name]
    with dealer(tcp_queue) as bare:
        reply = ask(bare, header)
        assert (reply["type"], reply["code"]) == ("error", code)
        assert ask(bare, msgpack.packb({**HELLO, "name": f"after-{name}"}))["type"] == "welcome"


OBJECTS = {
    "deep": b"\x91" * 30 + b"\xc0",
    "extension": b"\xd4\x03x",
    "timestamp": b"\xd6\xff\x00\x00\x00\x01",
    "timestamp-as-key": b"\x81\xd6\xff\x00\x00\x00\x01\xc0",
    "two-values": b"\xc0\xc0",
    "cut-short": b"\xa5ab",
    "no-text": b"\xa2\xff\xfe",
    "list-as-key": b"\x81\x90\xc0",
    "none": b"",
}


@pytest.mark.parametrize("name", OBJECTS)
def test_unbounded_object_rows_are_refused(tcp_queue: Address, name: str) -> None:
    row, partition = OBJECTS[name], f"object-{name}"
    head = {"name": "x", "kind": "object", "dtype": "", "rows": 1, "item_shape": []}
    with dealer(tcp_queue) as bare:
        session = ask(bare, msgpack.packb({**HELLO, "name": partition}))["session"]
        at = {"session": session, "partition": partition}
        assert ask(bare, msgpack.packb({"type": "open", "id": "a.2", "tasks": TASKS, **at}))["type"] == "ok"
        put = {"type": "put", "id": "a.3", "ids": [0], "columns": [head], **at}
        reply = ask(bare, msgpack.packb(put), bytes(8) + len(row).to_bytes(8, "little"), row)
        assert reply["code"] == ("too_large" if name == "deep" else "bad_request")


def test_a_wrong_token_is_refused_at_once(tcp_queue: Address, tmp_path: Path) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("not-the-token\n")
    wrong.chmod(0o600)
    client = TaskClient(ZmqTransport(Address.parse(tcp_queue.url, wrong)))
    with pytest.raises(QueueUnreachableError, match="refuses this client"):
        client.hello("w", "r", incarnation=1)
    client.close()
    for token, patience_s, said in (("not-the-token", 10.0, "refuses"), (None, 0.5, "")):
        other, start = reference_client.Client(tcp_queue.url, token, patience_s=patience_s), time.monotonic()
        with pytest.raises(UnreachableError, match=said):
            other.hello("w", "r", 1)
        assert time.monotonic() - start < 5.0
        other.close()


@pytest.mark.parametrize(("content", "message"), [("t\u00f6ken\n", "is not ASCII text"), (" \n", "is empty")])
def test_a_file_without_a_token_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "token"
    file.write_text(content, encoding="utf-8")
    file.chmod(0o600)
    for use in (read_token, create_token):
        with pytest.raises(InputError, match=message) as caught:
            use(file)
        assert str(file) in str(caught.value)


def test_a_queue_at_an_ipv6_address(short_tmp: Path) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
            port = probe.getsockname()[1]
    except OSError:
        pytest.skip("this machine has no IPv6")
    address = Address.parse(f"tcp://[::1]:{port}", short_tmp / "token-6")
    with queue_thread(address, memory_limit=1 << 20):
        place = Place("library", address=address)
        assert place.worker().client.stats()["sessions"][0]["role"] == "worker"
        place.leave()


@pytest.mark.parametrize("url", ["tcp://[::1:5555", "tcp://[::1]", "tcp://::1:5555"])
def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a queue address"):
        Address.parse(url)


def test_a_socket_in_an_open_directory_is_refused(tmp_path: Path) -> None:
    address = ipc_address(tmp_path / "open")
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        Server(Engine(memory_limit=1 << 20, clock=time.monotonic, opens=any_partition), address)


def test_an_address_in_use_is_said_so(ipc_queue: Address, tcp_queue: Address) -> None:
    for address in (ipc_queue, tcp_queue):
        with pytest.raises(XtokenError, match="in use"):
            Server(Engine(memory_limit=1 << 20, clock=time.monotonic, opens=any_partition), address)


class Breaker:
    """A relay that cuts a connection as soon as the queue has answered something on it, for the first few."""

    def __init__(self, port: int, cuts: int) -> None:
        self.target = port
        self.cuts = cuts
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self._stop = False
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._stop:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.target))
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        received = 0
        try:
            while data := source.recv(1 << 16):
                received += len(data)
                if answers and received > 400 and self.cuts:
                    self.cuts -= 1
                    break
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._stop = True
        self.listener.close()


def test_broken_connection_before_the_reply(tcp_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_client, "SLICE_S", 0.5)
    breaker = Breaker(int(tcp_place.address.url.rsplit(":", 1)[1]), cuts=2)
    through = Address.parse(f"tcp://127.0.0.1:{breaker.port}", tcp_place.address.token_file)
    place = Place(tcp_place.kind, address=through)
    peer, name = place.worker(), place.name("p")
    peer.call("open", partition=name, tasks=TASKS)
    ids = list(range(40))
    for i in ids:
        peer.call("put", partition=name, ids=[i], columns={"x": ints([i])})
    taken = []
    while len(taken) < len(ids):
        found = peer.call("claim", partition=name, task="a", count=3, fields=["x"])
        taken += found["ids"]
        peer.call("ack", partition=name, task="a", ids=found["ids"])
    assert (taken, breaker.cuts) == (ids, 0)
    place.leave()
    breaker.close()


def test_a_late_copy_from_another_connection_leases_nothing(short_tmp: Path) -> None:
    address = ipc_address(short_tmp / "late")
    with queue_thread(address, memory_limit=1 << 20):
        client, old, other = (reference_client.Client(address.url) for _ in range(3))
        client.hello("w", "worker", 1)
        other.hello("producer", "worker", 1)
        client.call("open", partition="p", tasks=TASKS)
        client.call("put", partition="p", ids=[0, 1, 2], columns={"x": ints([0], [1], [2])})
        claim = {"type": "claim", "session": client.session, "partition": "p", "task": "a", "count": 1}

        def sent(**fields: Any) -> Any:
            header = {**claim, "id": f"{client.lane}.{next(client.numbers)}", **fields}
            return header, client.exchange(header, [])[0]

        granted, lease = sent()
        assert lease["ids"] == old.exchange(granted, [])[0]["ids"] == [0]
        client.call("ack", partition="p", task="a", ids=[0])
        refused = old.exchange(granted, [])[0]
        assert (refused["code"], refused["id"]) == ("bad_request", granted["id"])
        sent(count=2)
        expired, nothing = sent(wait_s=0.01)
        assert nothing["type"] == "empty"
        other.call("put", partition="p", ids=[3], columns={"x": ints([3])})
        assert old.exchange(expired, [])[0]["type"] == "empty"
        assert sent()[1]["ids"] == [3]
        for peer in (client, old, other):
            peer.close()


def test_a_claim_repeated_on_a_new_connection_is_granted_once(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(
        Engine(memory_limit=1 << 20, clock=time.monotonic, opens=any_partition), ipc_address(short_tmp / "repeated")
    )
    sent: list[tuple[bytes, Any]] = []
    monkeypatch.setattr(server, "_send_now", lambda peer, reply, _buffers: sent.append((peer, reply)))

    def tell(peer: bytes, request: m.Request, *buffers: bytes) -> Any:
        """What the peer is answered at once."""
        before = len(sent)
        server._on_message(peer, [zmq.Frame(m.encode(request)), *map(zmq.Frame, buffers)])
        return next((reply for to, reply in sent[before:] if to == peer), None)

    def put(number: int, *ids: int) -> None:
        heads, buffers = pack_columns({"x": Column("dense", "uint8", len(ids), (), memoryview(bytes(len(ids))))})
        tell(b"c", m.Put(id=f"c.{number}", **sessions["c"], ids=list(ids), columns=heads), *map(bytes, buffers))

    sessions: dict[str, dict[str, str]] = {}
    for name in "abcd":
        hello = m.Hello(id=f"{name}.1", versions=[m.VERSION], name=name, role="w", incarnation=1)
        sessions[name] = {"session": tell(name.encode(), hello).session, "partition": "p"}
    tell(b"c", m.OpenPartition(id="c.2", **sessions["c"], tasks=[m.TaskDef(name="t", requires=["x"])]))
    put(3, 0)
    claims = {n: m.Claim(id=f"{n}.2", **sessions[n], task="t", count=1, wait_s=5.0) for n in "abd"}
    assert tell(b"d", claims["d"]).ids == [0]
    assert [tell(name, claims[name.decode()]) for name in (b"b", b"a")] == [None, None]
    tell(b"d", m.Bye(id="d.3", session=sessions["d"]["session"]))
    assert tell(b"a again", claims["a"]).ids == [0]
    tell(b"a again", m.Ack(id="a.3", **sessions["a"], task="t", ids=[0]))
    put(4, 1, 2)
    server._answer_waiting(time.monotonic())
    assert [(peer, reply.ids) for peer, reply in sent if isinstance(reply, m.Claimed)] == [
        (b"d", [0]), (b"a again", [0]), (b"b", [1]),
    ]  # fmt: skip
    assert len(server.waiting) == 0
    server.close()


def test_nobody_there_ends_by_the_deadline(short_tmp: Path) -> None:
    nobody = ipc_address(short_tmp / "n")
    client = TaskClient(ZmqTransport(nobody, patience_s=0.3))
    with pytest.raises(QueueUnreachableError, match=r"no reply from .*: is the queue running there"):
        client.hello("w", "r", incarnation=1)
    client.close()
    other = reference_client.Client(nobody.url, patience_s=0.3)
    with pytest.raises(UnreachableError):
        other.hello("w", "r", 1)
    other.close()


def test_restarted_queue_has_no_old_sessions(short_tmp: Path) -> None:
    address = tcp_address(short_tmp / "again")
    with queue_process(address):
        place = Place("library", address=address)
        peer = place.worker()
    process = start_queue(address)
    try:
        with pytest.raises(RefusedError) as refused:
            peer.call("heartbeat", phase="run")
        assert refused.value.code == "stale_session"
    finally:
        place.leave()
        process.terminate()
        process.wait()
