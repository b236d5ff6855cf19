"""What a queue refuses from a peer: misfit columns, secrets of others, numbers that lock others out."""

import json
import time
from typing import Any

import msgspec
import pytest

from tests.support.memory_queue import MemoryQueue
from xtoken_core.compat.task_client import TaskClient
from xtoken_core.data_plane.run_client import RunClient
from xtoken_core.wire import Column, ColumnHead, QueueError, object_column, unpack_columns
from xtoken_core.wire import messages as m
from xtoken_core.wire.bounds import MAX_AHEAD_S, MAX_DOCUMENT_BYTES, MAX_IDS
from xtoken_core.wire.columns import offsets_from_lengths

LARGEST = (1 << 63) - 1


def client(queue: MemoryQueue, role: str = "worker", **session: Any) -> TaskClient:
    made = queue.connect()
    made.hello(f"{role}-{time.time_ns()}", role, **{"incarnation": 1, **session})
    return made


@pytest.fixture
def queue() -> MemoryQueue:
    return MemoryQueue()


OFFSETS = offsets_from_lengths([LARGEST, 0])
VALID = object_column([None])
EIGHT, ROW = (8).to_bytes(8, "little"), ColumnHead("x", "jagged", "int64", 1)
MISFITS = {
    "a buffer too few": (ROW, [bytes(16)]),
    "a buffer too many": (ROW, [bytes(16), b"", b""]),
    "offsets too short": (ROW, [bytes(8), b""]),
    "offsets from one": (ROW, [b"\1" + bytes(7) + b"\1" + bytes(7), bytes(8)]),
    "offsets beyond": (ROW, [bytes(8) + EIGHT, bytes(8)]),
    "offsets fall": (ColumnHead("x", "jagged", "int64", 2), [bytes(8) + EIGHT + bytes(8), b""]),
    "offsets negative": (ROW, [bytes(8) + b"\xff" * 8, b""]),
    "dense size": (ColumnHead("x", "dense", "int64", 1), [bytes(7)]),
    "overflow": (ColumnHead("x", "dense", "int64", 1, [1 << 32] * 8), [b""]),
    "unknown dtype": (ColumnHead("x", "jagged", "complex64", 1), [bytes(16), b""]),
    "too many rows": (ColumnHead("x", "jagged", "int64", 1 << 40), [bytes(16), b""]),
    "offsets of items without bytes": (ColumnHead("x", "jagged", "int64", 2, [0]), [OFFSETS, b""]),
    "items without end": (ColumnHead("x", "dense", "int64", 0, [1 << 32] * 8), [b""]),
    "bool 7": (ColumnHead("x", "dense", "bool", 1), [b"\7"]),
    "jagged bool 2": (ColumnHead("x", "jagged", "bool", 1), [offsets_from_lengths([3]), b"\0\1\2"]),
    "object with dtype": (ColumnHead("x", "object", "int64", 1), [VALID.offsets, VALID.values]),
    "object with shape": (ColumnHead("x", "object", "", 1, [2]), [VALID.offsets, VALID.values]),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_misfit_column_is_refused(misfit: str) -> None:
    head, buffers = MISFITS[misfit]
    with pytest.raises(QueueError, match=r"column 'x'|more buffers than|unknown dtype") as refused:
        unpack_columns([head], buffers)
    assert refused.value.code == "bad_request"


def test_a_column_of_an_unknown_kind_is_refused() -> None:
    head = ColumnHead("x", "pickle", "int64", 1)
    with pytest.raises(QueueError, match="pickle") as refused:
        m.decode_request(m.encode(m.Put(id="a.1", session="s", partition="p", ids=[0], columns=[head])))
    assert refused.value.code == "bad_request"


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(QueueError) as refused:
        unpack_columns([ROW, ROW], [bytes(16), b""] * 2)
    assert refused.value.code == "bad_request"


def test_a_claim_whose_rows_cannot_be_read_leases_nothing(queue: MemoryQueue) -> None:
    peer = client(queue)
    peer.open("p", [m.TaskDef(name="a", requires=["x"])])
    peer.put("p", [0, 1], {"x": _column()})
    part = queue.engine.partitions["p"]
    for batch in part.store._tables["x",].values():  # as only damage could make them
        batch.columns["x"] = msgspec.structs.replace(_column(), offsets=offsets_from_lengths([LARGEST, 0]), dtype="?")
    with pytest.raises(QueueError, match="unknown dtype"):
        peer.claim("p", "a", ids=[1, 0], fields=["x"])
    assert part.samples.leases == {}
    assert peer.list_samples("p", "ready", task="a").ids == [0, 1]


def test_a_refused_claim_of_a_run_leases_nothing(queue: MemoryQueue) -> None:
    trainer, teacher, rewinds = running(queue)
    stranger = ["teacher_0_full_logits_ipc"]  # a field that every sample has in the end, and no column
    ring = teacher.announce_ring(0, 0, trainer_of(teacher), b"h")
    trainer.confirm_ring(0, ring)
    first = teacher.claim_slot(ring, [0, 1], [], rewinds=rewinds, wait_s=0.0)
    teacher.complete(first[0].lease)
    part = queue.engine.partitions["r"]
    for _ in range(2):
        with pytest.raises(QueueError, match="has no field"):
            trainer.claim_batch([0, 1], stranger, rewinds=rewinds, wait_s=0.0)
        assert part.samples.leases == {}
    found = trainer.claim_batch([0, 1], ["input_ids"], rewinds=rewinds, wait_s=0.0)
    assert [ref.generation for ref in found[0].slots] == [1]


def running(queue: MemoryQueue) -> tuple[RunClient, RunClient, int]:
    """A run's trainer and teacher, and its count of rewinds; the rows of the first step are there."""
    collator, trainer, teacher = (client(queue, role) for role in ("collator", "trainer", "teacher"))
    run = m.RunDef(positions=8, samples_per_step=2, block_size=2, span=6, teachers=1, ranks=1, slots=2, document=b"{}")
    collator.open("r", run=run)
    block = RunClient(collator, "r").lease_block(wait_s=0.0)
    RunClient(collator, "r").put_block(block.lease, [0, 1], {"input_ids": _column()}, {})
    made = RunClient(trainer, "r")
    return made, RunClient(teacher, "r"), made.rewind(0, {}, {})


def trainer_of(teacher: RunClient) -> str:
    found = teacher.await_trainer(0, wait_s=0.0)
    return found.trainer


def _column() -> Column:
    return Column("jagged", "int64", 2, (), memoryview(bytes(16)), offsets_from_lengths([1, 1]))


def test_no_worker_sees_the_session_id_of_another(queue: MemoryQueue) -> None:
    trainer, teacher, _ = running(queue)
    watcher = client(queue)
    shown = json.dumps(watcher.stats()) + trainer_of(teacher)
    secrets = [trainer.client.session, teacher.client.session]
    assert [secret for secret in secrets if secret in shown] == []
    for secret in (trainer_of(teacher), *(s["id"] for s in watcher.stats()["sessions"])):
        with pytest.raises(QueueError, match="unknown session"):
            queue.engine.handle(m.Bye(id="b", session=secret), ())


def test_an_incarnation_of_the_far_future_locks_nobody_out(queue: MemoryQueue) -> None:
    for incarnation in (LARGEST, time.time_ns() + int((MAX_AHEAD_S + 60) * 1e9)):
        with pytest.raises(QueueError, match="in the future"):
            client(queue, incarnation=incarnation)
    client(queue, incarnation=time.time_ns() + 10**9)


@pytest.mark.parametrize("kind", ["get", "claim", "ack"])
def test_ids_of_a_request_are_bounded(queue: MemoryQueue, kind: str) -> None:
    peer = client(queue)
    peer.open("p", [m.TaskDef(name="a", requires=["x"])])
    ids = list(range(MAX_IDS + 1))
    calls = {
        "get": lambda: peer.get("p", ids, ["x"]),
        "claim": lambda: peer.claim("p", "a", ids=ids),
        "ack": lambda: peer.ack("p", "a", ids),
    }
    with pytest.raises(QueueError, match="length <= 65536") as refused:
        calls[kind]()
    assert refused.value.code == "bad_request"


def test_statistics_that_no_reply_can_hold_are_refused(queue: MemoryQueue) -> None:
    peer = client(queue)
    tasks = [m.TaskDef(name=f"{i:0128d}", requires=[]) for i in range(64)]
    for number in range(200):
        peer.open(f"p{number}", tasks)
    with pytest.raises(QueueError, match=f"a reply may have {MAX_DOCUMENT_BYTES}") as refused:
        peer.stats()
    assert refused.value.code == "too_large"
