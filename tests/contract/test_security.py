"""Who may speak to a queue, and messages that are never finished."""

import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import msgpack
import psutil
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from tests.contract import reference_client
from tests.contract.attacker import Attacker
from tests.contract.peers import Place, ints
from tests.contract.processes import free_port, ipc_address, queue_process, queue_thread, tcp_address
from tests.contract.reference_client import UnreachableError
from tests.contract.test_transport import HELLO, TASKS, ask, dealer
from tests.support.cases import cases
from xtoken_core.compat.task_client import TaskClient
from xtoken_core.data_plane import zmq_transport
from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.keys import client_keys, create_client_keys, create_queue_keys
from xtoken_core.data_plane.zmq_transport import ZmqTransport
from xtoken_core.errors import ConfigError, InputError, QueueUnreachableError
from xtoken_services.cli.queue import queue_app
from xtoken_services.queue.authenticator import REFUSED, WELCOME, Authenticator
from xtoken_services.queue.connection_guard import HELD_FACTOR, SPARE_BYTES
from xtoken_services.queue.waiting import MAX_WAITING_OF_SESSION

MEMORY = 64 << 20


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A queue's and a client's directory of keys, not yet introduced to each other."""
    queue, client = tmp_path / "queue-keys", tmp_path / "client-keys"
    create_queue_keys(queue)
    create_client_keys(client)
    (client / "queue.key").write_bytes((queue / "queue.key").read_bytes())
    return queue, client


def test_allow_list_of_client_keys(keys: tuple[Path, Path]) -> None:
    queue, client = keys
    url = f"tcp://0.0.0.0:{free_port()}"
    reach = url.replace("0.0.0.0", "127.0.0.1")
    with queue_thread(Address.parse(url, keys=queue), memory_limit=MEMORY):
        stranger = TaskClient(ZmqTransport(Address.parse(reach, keys=client), patience_s=10.0))
        with pytest.raises(QueueUnreachableError):
            stranger.hello("w", "r", incarnation=1)
        stranger.close()
        (queue / "clients" / "node-1.key").write_bytes((client / "client.key").read_bytes())
        with TaskClient(ZmqTransport(Address.parse(reach, keys=client))) as friend:
            assert friend.hello("w", "r", incarnation=1)
            assert friend.stats()["sessions"][0]["name"] == "w"
        other = reference_client.Client(reach, curve=client_keys(client))
        other.hello("reference", "r", 1)
        assert b"reference" in other.call("stats")["document"]
        other.close()
        for token in (None, "a-token"):
            plain = reference_client.Client(reach, token, patience_s=0.5)
            with pytest.raises(UnreachableError):
                plain.hello("w", "r", 1)
            plain.close()


def test_odd_files_among_the_keys_admit_nobody(keys: tuple[Path, Path]) -> None:
    queue, client = keys
    clients = queue / "clients"
    (clients / "half.key").write_text("curve\n    public-key")
    (clients / "binary.key").write_bytes(b"\xff\xfepublic-key\xff")
    (clients / "folder.key").mkdir()
    os.mkfifo(clients / "pipe.key")
    url = f"tcp://127.0.0.1:{free_port()}"
    with queue_thread(Address.parse(url, keys=queue), memory_limit=MEMORY):
        stranger = TaskClient(ZmqTransport(Address.parse(url, keys=client), patience_s=10.0))
        for _ in range(2):
            with pytest.raises(QueueUnreachableError, match="refuses this client"):
                stranger.hello("w", "r", incarnation=1)
        stranger.close()
        (clients / "node-1.key").write_bytes((client / "client.key").read_bytes())
        with TaskClient(ZmqTransport(Address.parse(url, keys=client))) as friend:
            assert friend.hello("w", "r", incarnation=1)


def test_a_refusal_before_the_first_message_is_told(keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_transport, "SEND_S", 0.1)
    queue, client = keys
    url = f"tcp://127.0.0.1:{free_port()}"
    with queue_thread(Address.parse(url, keys=queue), memory_limit=MEMORY), zmq.Context() as context:
        refused = zmq_transport.Connection(context, Address.parse(url, keys=client))
        with pytest.raises(QueueUnreachableError, match="refuses this client"):
            for _ in range(100):  # the first may be taken before the handshake
                refused.send(b"hello", [])
                time.sleep(0.05)
        refused.close()


def test_a_failing_check_refuses_the_peer(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([True])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    Authenticator(context, lambda _mechanism, _credentials: next(answers), lambda _address: False)
    asking = context.socket(zmq.REQ)
    asking.connect("inproc://zeromq.zap.01")
    whole = [b"1.0", b"7", b"", b"127.0.0.1", b"", b"CURVE", bytes(32)]
    statuses = []
    for question in ([b"1.0"], whole, whole, whole[:5]):
        asking.send_multipart(question)
        statuses.append(asking.recv_multipart()[2])
    asking.close(linger=0)
    context.term()
    assert statuses == [REFUSED, WELCOME, REFUSED, REFUSED]
    assert "cannot check a connecting peer" in caplog.text


def test_a_token_in_clear_is_refused_beyond_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("tcp://0.0.0.0:5555", "tcp://10.0.0.7:5555", "tcp://node-1:5555"):
        with pytest.raises(ConfigError, match="in clear"):
            Address.parse(url, tmp_path / "token")
        with pytest.raises(ConfigError, match="in clear"):
            Address.parse(url)
    with pytest.raises(ConfigError, match="both"):
        Address.parse("tcp://10.0.0.7:5555", tmp_path / "token", tmp_path)
    monkeypatch.setenv("XTOKEN_QUEUE_KEYS", str(tmp_path))
    assert Address.parse("tcp://10.0.0.7:5555").keys == tmp_path
    assert Address.parse("tcp://127.0.0.1:5555", tmp_path / "token").keys is None


def test_keys_that_are_missing_or_open_are_named(keys: tuple[Path, Path], tmp_path: Path) -> None:
    queue, client = keys
    with pytest.raises(InputError, match="there already"):
        create_queue_keys(queue)
    with pytest.raises(InputError, match=r"queue\.key"):
        client_keys(tmp_path)
    (client / "client.key_secret").chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        client_keys(client)
    for text in ("nonsense", "public-key"):
        (client / "queue.key").write_text(text)
        with pytest.raises(InputError, match=r"queue\.key is not a key file"):
            client_keys(client)


def test_a_peer_that_does_not_read_is_disconnected(short_tmp: Path) -> None:
    address = ipc_address(short_tmp / "deaf")
    with queue_thread(address, memory_limit=MEMORY), dealer(address, holds=4) as deaf:
        place = Place("library", address=address)
        peer = place.worker()
        peer.call("open", partition="p", tasks=TASKS)
        peer.call("put", partition="p", ids=[0], columns={"x": ints(list(range(1 << 15)))})
        session = ask(deaf, msgpack.packb(HELLO))["session"]
        monitor = deaf.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        get = {"type": "get", "session": session, "partition": "p", "ids": [0], "fields": ["x"]}
        for number in range(400):
            deaf.send_multipart([msgpack.packb({**get, "id": f"b{number}.1"})])
        assert peer.call("get", partition="p", ids=[0], fields=["x"])["ids"] == [0]
        poller, received, ends = zmq.Poller(), 0, []
        for source in (deaf, monitor):
            poller.register(source, zmq.POLLIN)
        while not ends:
            events = dict(poller.poll(10_000))
            assert events, f"still connected after {received} replies"
            if deaf in events:
                deaf.recv_multipart()
                received += 1
            ends = [source for source in events if source is monitor]
        assert received < 400
        assert peer.call("get", partition="p", ids=[0], fields=["x"])["ids"] == [0]
        place.leave()


def test_a_session_may_not_wait_without_end(short_tmp: Path) -> None:
    address = ipc_address(short_tmp / "many")
    with queue_thread(address, memory_limit=MEMORY), dealer(address) as bare:
        session = ask(bare, msgpack.packb(HELLO))["session"]
        at = {"session": session, "partition": "p"}
        ask(bare, msgpack.packb({"type": "open", "id": "a.2", "tasks": TASKS, **at}))
        claim = {"type": "claim", "task": "a", "count": 1, "wait_s": 60.0, **at}
        for number in range(MAX_WAITING_OF_SESSION):
            bare.send_multipart([msgpack.packb({**claim, "id": f"c{number}"})])
        assert ask(bare, msgpack.packb({**claim, "id": "one-more"}))["code"] == "too_large"
        shown = json.loads(_stats(bare, session))
        assert shown["waiting"] == MAX_WAITING_OF_SESSION
        repeated = {**claim, "id": "c7"}
        bare.send_multipart([msgpack.packb(repeated)])
        assert json.loads(_stats(bare, session))["waiting"] == MAX_WAITING_OF_SESSION


def _stats(bare: zmq.Socket[bytes], session: str) -> bytes:
    document: bytes = ask(bare, msgpack.packb({"type": "stats", "id": "s", "session": session}))["document"]
    return document


def test_metrics_are_served(short_tmp: Path) -> None:
    address = ipc_address(short_tmp / "metrics")
    with queue_thread(address, memory_limit=MEMORY, metrics_port=0) as server:
        place = Place("library", address=address)
        peer = place.worker()
        peer.call("open", partition='odd "name"', tasks=TASKS)
        peer.call("put", partition='odd "name"', ids=[0, 1], columns={"x": ints([1], [2])})
        peer.call("claim", partition='odd "name"', task="a", count=1)
        url = f"http://127.0.0.1:{server.metrics.port}"
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/other", timeout=10)
        place.leave()
    samples = {
        (sample.name.removeprefix("xtoken_queue_"), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    at = ("partition", 'odd "name"')
    assert samples["task_samples", at, ("state", "leased"), ("task", "a")] == 1
    assert samples["task_bytes", at, ("state", "leased"), ("task", "a")] == 8
    assert samples["partition_leases_by_age", ("le", "+Inf"), at] == 1
    assert samples["partition_rows_put_total", at] == 2
    assert samples["requests_total", ("type", "claim")] == 1
    assert samples["request_seconds_count", ("type", "put")] == 1
    assert samples["request_seconds_bucket", ("le", "+Inf"), ("type", "put")] == 1
    assert samples["bytes",] == 2 * 8 + 3 * 8
    assert all(re.match(r"# (HELP|TYPE) xtoken_queue_|xtoken_queue_", line) for line in text.splitlines())
    assert not any(name.endswith("_created") for name, *_ in samples)


def test_a_queue_can_be_looked_into(short_tmp: Path) -> None:
    address = ipc_address(short_tmp / "look")
    runner = CliRunner()
    with queue_thread(address, memory_limit=MEMORY):
        place = Place("library", address=address)
        peer = place.worker("producer")
        peer.call("open", partition="words", tasks=TASKS)
        peer.call("put", partition="words", ids=[4], columns={"x": ints([1, 2])})
        shown = runner.invoke(queue_app, ["stats", "--queue", address.url])
        assert json.loads(shown.stdout)["partitions"]["words"]["samples"] == 1
        shown = runner.invoke(queue_app, ["peek", "words", "4", "--queue", address.url])
        assert json.loads(shown.stdout) == {"fields": {"x": 16}, "status": {"a": "ready"}, "attempts": 0, "reason": ""}
        shown = runner.invoke(queue_app, ["top", "--queue", address.url, "--once"])
        assert shown.exit_code == 0
        assert "words" in shown.stdout
        assert "producer" in shown.stdout
        place.leave()


def test_a_slow_view_keeps_its_session(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = ipc_address(short_tmp / "slow")
    silences = []

    def look(client: TaskClient, *, every: float, once: bool) -> None:
        silences.append((every, next(iter(server.engine.sessions.live.values())).silence))

    monkeypatch.setattr("xtoken_services.queue.top.show", look)
    with queue_thread(address, memory_limit=MEMORY) as server:
        for every in ("1", "33", "3600"):
            assert CliRunner().invoke(queue_app, ["top", "--queue", address.url, "--every", every]).exit_code == 0
        assert CliRunner().invoke(queue_app, ["top", "--queue", address.url, "--every", "3601"]).exit_code == 2
    assert silences == [(1.0, 30.0), (33.0, 99.0), (3600.0, 10800.0)]


@cases(
    "options, message",
    (["--fsync", "bogus"], "--fsync 'bogus': it is one of interval, always"),
    (["--fsync", "always"], "--fsync always needs a journal"),
    (["--group", "7"], "--group 7 needs the run"),
)
def test_options_without_the_one_that_they_need_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    for name in ("setproctitle", "one_heap", "Server"):
        monkeypatch.setattr(f"xtoken_services.queue.main.{name}", lambda *_, **__: None)
    result = CliRunner().invoke(queue_app, ["--bind", f"ipc://{tmp_path}/q", *options])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_keys_can_be_made_by_command(tmp_path: Path) -> None:
    runner = CliRunner()
    assert "queue.key" in runner.invoke(queue_app, ["keygen", str(tmp_path / "q")]).stdout
    assert "clients/" in runner.invoke(queue_app, ["keygen", "--client", str(tmp_path / "c")]).stdout
    assert ((tmp_path / "q" / "queue.key_secret").stat().st_mode & 0o777) == 0o600


SMALL_MEMORY = 32 << 20
BETWEEN_LOOKS = 160 << 20
"""What may come in before the queue looks again; the sum over all attackers, on a busy machine."""


@contextmanager
def watched(address: Address) -> Iterator[tuple[Callable[[], int], Callable[[], int]]]:
    """A queue process: by how much it has grown at most, and by how much it is larger now."""
    with queue_process(address, "--memory-limit", str(SMALL_MEMORY)) as process:
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


@cases(
    "transport, frame",
    pytest.param("tcp", 1 << 20, marks=pytest.mark.slow),
    pytest.param("ipc", 1 << 16, marks=pytest.mark.slow),
    ("ipc", 200),
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
            peer.call("open", partition="p", tasks=TASKS)
        attackers = [Attacker(address) for _ in range(2)]
        # Who never reads may not notice a cut while its window is 0: it gives up before the idle session ends.
        limits = {"frame": frame, "seconds": 10.0}
        floods = [threading.Thread(target=a.flood, args=(1 << 30,), kwargs=limits) for a in attackers]
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
        assert grown() < SMALL_MEMORY + SPARE_BYTES + BETWEEN_LOOKS
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
        busy.call("open", partition="p", tasks=TASKS)
        attackers = [stack.enter_context(closing(Attacker(address))) for _ in range(parts)]
        for number, attacker in enumerate(attackers):
            attacker.flood(part)
            busy.call("put", partition="p", ids=[number], columns={"x": ints([number])})
        place.leave()
        assert any(attacker.cut(0.01) for attacker in attackers)
        assert sum(not one.cut(0.001) for one in waiting) >= idle / 2
        assert grown() < SMALL_MEMORY + SPARE_BYTES + BETWEEN_LOOKS


def test_unread_replies_are_dropped(short_tmp: Path) -> None:
    """Rows in another order than they were put are copied for each answer; one peer may have 64 of these."""
    address = ipc_address(short_tmp / "u-deaf")
    with watched(address) as (grown, now):
        place = Place("library", address=address)
        peer = place.worker()
        peer.call("open", partition="p", tasks=TASKS)
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
        while now() > len(rows) * len(rows[0]) * HELD_FACTOR + SMALL_MEMORY + SPARE_BYTES:
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
