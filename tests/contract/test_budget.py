"""Memory that a client can make a queue take beside the values of samples: it is bounded, account by account."""

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import zmq

from tests.contract.peers import Place
from tests.contract.processes import ipc_address, queue_process
from tests.contract.test_memory import settled
from tests.contract.test_transport import dealer
from tests.support.memory_queue import MemoryQueue
from xtoken_core.compat.task_client import TaskClient
from xtoken_core.queue.budget import BASE_BYTES, PARTS, Account, ReasonMap
from xtoken_core.wire import Column, QueueError
from xtoken_core.wire import messages as m
from xtoken_core.wire.bounds import MAX_DOCUMENT_BYTES, MAX_IDS, MAX_WAITING_OF_SESSION

MEMORY = 64 << 20
BUDGET = BASE_BYTES + MEMORY // 4
SLACK = 1.25
ROWS = 4096


def rows_without_bytes(client: TaskClient) -> None:
    """Put samples of no bytes, some in one column, some one by one in several."""
    empty = Column("dense", "uint8", ROWS, (0,), memoryview(b""))
    one = Column("dense", "uint8", 1, (0,), memoryview(b""))
    client.open("rows", [m.TaskDef(name="a", requires=["x"])])
    for first in range(0, 1 << 40, ROWS + 8):
        client.put("rows", range(first, first + ROWS), {"x": empty})
        for i in range(first + ROWS, first + ROWS + 8):
            client.put("rows", [i], dict.fromkeys(("x", "y", "z"), one))


def documents(client: TaskClient) -> None:
    """Open partitions with the largest documents."""
    for number in range(1000):
        run = m.RunDef(positions=8, samples_per_step=2, block_size=2, span=6, teachers=1, ranks=1, slots=2,
                       document=number.to_bytes(8, "little") * (MAX_DOCUMENT_BYTES // 8))  # fmt: skip
        client.open(f"document {number}", run=run)


def reasons(client: TaskClient) -> None:
    """Rewind a run with reasons of skipped positions."""
    client.open("skipped", run=m.RunDef(positions=1 << 30, samples_per_step=1 << 20, block_size=4, span=3 << 20,
                                        teachers=1, ranks=1, slots=2, document=b"{}"))  # fmt: skip
    for count in range(30_000, 300_000, 30_000):
        skipped = {i: f"{count} {i}" * 20 for i in range(count)}
        request = m.Rewind(id=f"r.{count}", session=client.session, partition="skipped", step=1, skipped=skipped)
        client.ask(request, m.Rewound)


SLOW = pytest.mark.slow
ATTACKS: dict[str, tuple[Account, Callable[[TaskClient], None]]] = {
    "rows": ("samples", rows_without_bytes),
    "documents": ("partitions", documents),
    "reasons": ("samples", reasons),
}


@pytest.mark.parametrize("attack", ["rows", pytest.param("documents", marks=SLOW), pytest.param("reasons", marks=SLOW)])
def test_bookkeeping_is_bounded(short_tmp: Path, attack: str, record_property: Callable[[str, object], None]) -> None:
    account, run = ATTACKS[attack]
    address = ipc_address(short_tmp / f"b-{attack}")
    with queue_process(address, "--memory-limit", str(MEMORY)) as started:
        process, place = psutil.Process(started.pid), Place("library", address=address)
        client: TaskClient = place.worker("trainer").client
        before = process.memory_info().rss
        with pytest.raises(QueueError, match="bookkeeping") as refused:
            run(client)
        bound = BUDGET * PARTS[account] * SLACK + MAX_DOCUMENT_BYTES
        grown = settled(process, before + bound) - before
        place.leave()
    record_property("grown_bytes", grown)
    assert refused.value.code == "no_room"
    assert grown < bound


@pytest.mark.slow
def test_waiting_requests_and_kept_replies_are_bounded(short_tmp: Path) -> None:
    """The client whose requests take most is answered `empty` early; other clients' wait on."""
    address = ipc_address(short_tmp / "b-waiting")
    with queue_process(address, "--memory-limit", str(MEMORY)) as started, dealer(address, holds=0) as bare:
        process, place = psutil.Process(started.pid), Place("library", address=address)
        client: TaskClient = place.worker().client
        client.open("p", [m.TaskDef(name="a", requires=["x"])])
        before = process.memory_info().rss
        ids = list(range(1 << 40, (1 << 40) + MAX_IDS))
        for number in range(MAX_WAITING_OF_SESSION // 4):
            get = m.Get(id=f"g{number}", session=client.session, partition="p", ids=ids, fields=["x"], wait_s=60.0)
            bare.send(m.encode(get))
        early = 0
        while bare.poll(2000, zmq.POLLIN):
            assert isinstance(m.decode_reply(bare.recv()), m.Empty)
            early += 1
        waiting = client.stats()["waiting"]
        bound = BUDGET * PARTS["waiting"] * SLACK + MAX_DOCUMENT_BYTES
        grown = settled(process, before + bound) - before
        place.leave()
    assert grown < bound
    assert 0 < early < MAX_WAITING_OF_SESSION // 4
    assert waiting == MAX_WAITING_OF_SESSION // 4 - early


def test_kept_replies_are_bounded_by_the_session_that_holds_most() -> None:
    queue = MemoryQueue(memory_limit=1 << 20)
    engine, clients = queue.engine, [queue.connect() for _ in range(2)]
    for number, client in enumerate(clients):
        client.hello(f"w{number}", "worker", incarnation=1)
    honest, greedy = clients
    honest.open("p", [m.TaskDef(name="a", requires=["x"]), m.TaskDef(name="b", requires=["y"])])
    zeros = Column("dense", "uint8", 2048, (), memoryview(bytes(2048)))

    def claim(client: TaskClient, lane: str) -> m.Claimed:
        request = m.Claim(id=f"{lane}.1", session=client.session, partition="p", task="a", count=2048)
        return client.ask(request, m.Claimed)[0]

    honest.put("p", range(2048), {"x": zeros})
    first = claim(honest, "honest")
    for lane in range(1, 95):
        greedy.put("p", range(lane * 2048, (lane + 1) * 2048), {"x": zeros})
        lease = claim(greedy, f"lane{lane}")
        greedy.ack("p", "a", lease.ids)
        greedy.clear("p", lease.ids)
        assert engine.budget.excess("replies") <= 0
    assert claim(honest, "honest") == first


def test_accounts_return_to_nothing() -> None:
    queue = MemoryQueue(memory_limit=1 << 20)
    client = queue.connect()
    client.hello("w", "worker", incarnation=1)
    client.open("p", [m.TaskDef(name="a", requires=["x"]), m.TaskDef(name="b", requires=["x"], order="by_id")])
    for first in range(0, 64, 8):
        client.put("p", range(first, first + 8), {"x": Column("dense", "uint8", 8, (), memoryview(bytes(8)))})
    for task in ("a", "b"):
        ids = list(range(64)) if task == "b" else []
        lease = client.claim("p", task, ids=ids, count=0 if ids else 64)
        client.ack("p", task, lease[0].ids)
    client.clear("p")
    client.bye()
    other = queue.connect()
    other.hello("w", "worker", incarnation=2)
    assert other.stats()["budget"]["samples"]["bytes"] == 0
    other.bye()
    left = {account: count for account, count in queue.engine.budget.bytes.items() if count}
    assert left.keys() == {"partitions"}


def test_equal_reasons_are_kept_once() -> None:
    held = ReasonMap({1: "no text", 2: "no " + "text", 3: "other"})
    assert held.characters == len("no text") + len("other")
    del held[1]
    held[3] = "no text"
    assert (held, held.characters) == ({2: "no text", 3: "no text"}, len("no text"))
    held.discard(9)
    held.clear()
    assert held.nbytes == 0
