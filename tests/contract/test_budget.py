"""Memory of a queue: its budget, what its process takes, and that it gives it back."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq

from tests.contract.peers import Place
from tests.contract.processes import ipc_address, queue_process
from tests.contract.test_transport import dealer
from tests.support.memory_queue import MemoryQueue
from xtoken_core.compat.task_client import TaskClient
from xtoken_core.queue.budget import BASE_BYTES, PARTS, Account, ReasonMap
from xtoken_core.queue.store import Store
from xtoken_core.wire import Column, QueueError, pack_columns, select_rows, unpack_columns
from xtoken_core.wire import messages as m
from xtoken_core.wire.bounds import MAX_DOCUMENT_BYTES, MAX_IDS, MAX_WAITING_OF_SESSION
from xtoken_core.wire.columns import offsets_from_lengths

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


BATCH = 64
JAGGED = ("input_ids", "teacher_input_ids", "student_chunk_id", "teacher_chunk_id")


def batch(rng: random.Random, longest: int) -> dict[str, Column]:
    """A batch as a collator makes it: four int64 columns and a mask, rows of `longest / 2` to `longest` tokens."""
    columns = {}
    for name, dtype, unit in (*((name, "int64", 8) for name in JAGGED), ("mask", "bool", 1)):
        lengths = [rng.randint(longest // 2, longest) for _ in range(BATCH)]
        values = memoryview(os.urandom(sum(lengths) * unit)) if dtype == "int64" else memoryview(bytes(sum(lengths)))
        columns[name] = Column("jagged", dtype, BATCH, (), values, offsets_from_lengths(lengths))
    return columns


def settled(process: psutil.Process, below: float) -> int:
    """The process's memory, once it is below so many bytes, or after 10 s."""
    deadline = time.monotonic() + 10
    while (now := process.memory_info().rss) > below and time.monotonic() < deadline:
        time.sleep(0.1)
    return int(now)


def fill(client: TaskClient, samples: int, longest: int) -> int:
    """Put samples; returns their bytes."""
    rng, payload = random.Random(1), 0
    for first in range(0, samples, BATCH):
        columns = batch(rng, longest)
        client.put("p", range(first, first + BATCH), columns, wait_s=30.0)
        payload += sum(column.nbytes for column in columns.values())
    return payload


@pytest.mark.parametrize(
    ("samples", "longest", "share"), [(1600, 1024, 1.25), pytest.param(10_048, 2048, 1.1, marks=[pytest.mark.slow])]
)
def test_memory_follows_what_is_held(
    short_tmp: Path, samples: int, longest: int, share: float, record_property: Callable[[str, object], None]
) -> None:
    address = ipc_address(short_tmp / f"m{samples}")
    with queue_process(address, "--memory-limit", str(1 << 30)) as started:
        process = psutil.Process(started.pid)
        place = Place("library", address=address)
        client: TaskClient = place.worker().client
        client.open("p", [m.TaskDef(name="a", requires=["input_ids"])])
        before = process.memory_info().rss
        payload = fill(client, samples, longest)
        assert client.stats()["bytes"] == payload
        full = settled(process, before + 1.25 * payload)
        while (found := client.claim("p", "a", count=BATCH, fields=["input_ids"])) is not None:
            client.ack("p", "a", found[0].ids)
        assert client.stats()["bytes"] == 0
        after = settled(process, share * before)
        place.leave()
    for name, value in (("before", before), ("payload", payload), ("full", full), ("after", after)):
        record_property(f"{name}_bytes", value)
    assert full - before <= 1.25 * payload
    assert after <= share * before


def address_of(view: memoryview) -> int:
    """Where a buffer's bytes lie."""
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


def test_a_batch_is_split_into_rows_without_a_copy() -> None:
    columns = batch(random.Random(2), 64)
    heads, buffers = pack_columns(columns)
    frames = [bytes(buffer) for buffer in buffers]
    received = unpack_columns(heads, frames)
    store = Store()
    store.put(range(BATCH), received, range(BATCH))
    first = {id(frame): address_of(memoryview(frame)) for frame in frames}
    for name, column in received.items():
        whole = address_of(column.values)
        assert whole in first.values()
        for row in range(BATCH):
            start, stop = column.row_bounds(row)
            one = store.read([row], [name])[name]
            assert (address_of(one.values), one.values.nbytes) == (whole + start, stop - start)
            assert one.values.obj is column.values.obj
        run = select_rows(column, range(7, 19))
        assert address_of(run.values) == whole + column.row_bounds(7)[0]
        assert store.read(range(7, 19), [name])[name].values.obj is column.values.obj
    assert store.nbytes == sum(column.nbytes for column in columns.values())
