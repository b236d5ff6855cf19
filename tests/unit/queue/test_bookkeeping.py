"""Bookkeeping of a queue: what is charged is what is held, and what is kept for repetitions is bounded."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from tests.unit.queue.run_calls import leased, make_run, put, put_block, rewind, rows
from xtoken_core.queue.any_partition import any_partition
from xtoken_core.queue.budget import (
    BATCH_BYTES,
    COLUMN_BYTES,
    ENTRY_BYTES,
    FIELD_BYTES,
    INTERVAL_BYTES,
    PARTS,
    RESULTS_FACTOR,
    SLOT_BYTES,
    VOLATILE_BYTES,
    Budget,
    cost_of_definition,
    cost_of_put,
    cost_of_reasons,
    cost_of_reply,
)
from xtoken_core.queue.engine import Engine, ReplyCache
from xtoken_core.queue.response import Response
from xtoken_core.queue.sample import Task
from xtoken_core.queue.sessions import Sessions
from xtoken_core.queue.store import COMPACT_BYTES, Store
from xtoken_core.queue.tasks.partition import SPARE_ENTRIES, OrderedSamples, ReadyQueue, TaskPartition
from xtoken_core.wire import Column, QueueError, pack_columns
from xtoken_core.wire import messages as m

RUN = m.RunDef(
    positions=8, samples_per_step=2, block_size=2, span=6, teachers=1, ranks=1, slots=2, max_dead=8, document=b""
)


def column(rows: int, size: int = 1) -> Column:
    return Column("dense", "uint8", rows, (size,), memoryview(bytes(rows * size)))


class Worker:
    """A worker of a queue in this process."""

    def __init__(self, engine: Engine, role: str = "trainer") -> None:
        self.engine, self.number = engine, 0
        hello = m.Hello(id="hello", versions=[m.VERSION], name=role, role=role, incarnation=1)
        self.session = engine.handle(hello, []).reply.session

    def ask(self, kind: Any, columns: dict[str, Column] | None = None, **fields: Any) -> Any:
        self.number += 1
        heads, buffers = pack_columns(columns or {})
        if columns is not None:
            fields["columns"] = heads
        request = kind(id=f"lane.{self.number}", session=self.session, partition="p", **fields)
        response = self.engine.handle(request, buffers)
        return None if response is None else response.reply


def opened(*tasks: m.TaskDef, memory_limit: int = 1 << 20, **definition: Any) -> tuple[Engine, Worker]:
    engine = Engine(memory_limit=memory_limit, clock=lambda: engine_time[0], opens=any_partition)
    worker = Worker(engine)
    worker.ask(m.OpenPartition, tasks=list(tasks), **definition)
    return engine, worker


engine_time = [0.0]


def test_the_queue_of_a_run_opens_no_other_tasks() -> None:
    worker = Worker(Engine(memory_limit=1 << 20, clock=lambda: 0.0))
    with pytest.raises(QueueError, match="the queue of a run: start one for other tasks by `xtoken queue`"):
        worker.ask(m.OpenPartition, tasks=[m.TaskDef(name="t", requires=[])])


def test_accounts_fit_the_budget() -> None:
    budget = Budget(1 << 20)
    assert sum(PARTS.values()) <= 1
    budget.add("samples", 5)
    budget.add("replies", 7)
    assert budget.used == 12


def test_results_may_exceed_their_account_by_a_quarter() -> None:
    budget = Budget(1 << 20)
    limit = budget.limits["samples"]
    budget.require("samples", limit + limit // 4, "a result", factor=RESULTS_FACTOR)
    with pytest.raises(QueueError, match="a result needs"):
        budget.require("samples", limit + limit // 4 + 2, "a result", factor=RESULTS_FACTOR)


@pytest.mark.parametrize("tasks", [1, 3])
def test_a_put_is_charged_what_it_takes(tasks: int) -> None:
    engine, worker = opened(*(m.TaskDef(name=f"t{i}", requires=["x"]) for i in range(tasks)))
    part = engine.partitions["p"]
    worker.ask(m.Put, {"x": column(1), "y": column(1)}, ids=[0])  # the first one has costs of its own
    engine.charge_partitions()
    before = part.overhead
    worker.ask(m.Put, {"x": column(5), "y": column(5)}, ids=[1, 2, 3, 4, 5])
    assert part.charged == part.overhead == before + cost_of_put(5, 2, tasks)


def test_a_result_is_charged_what_it_takes() -> None:
    engine, worker = opened(m.TaskDef(name="a", requires=["x"]), m.TaskDef(name="b", requires=["x"]))
    part = engine.partitions["p"]
    worker.ask(m.Put, {"x": column(3)}, ids=[1, 2, 3])
    lease = worker.ask(m.Claim, task="a", count=3).lease
    charged, held = part.charged, part.store.overhead
    worker.ask(m.Complete, {"r": column(3)}, lease=lease)
    assert part.charged - charged == part.store.overhead - held == 3 * ENTRY_BYTES + COLUMN_BYTES + BATCH_BYTES


def test_a_document_and_names_are_charged() -> None:
    cost = {size: cost_of_definition(definition(document=bytes(size))) for size in (0, 100)}
    assert cost[100] - cost[0] == 100


def definition(**run: Any) -> m.OpenPartition:
    return m.OpenPartition(
        id="r", session="s" * 32, partition="p", tasks=[], run=msgspec.structs.replace(RUN, **run)
    )  # fmt: skip


def test_tombstones_are_charged() -> None:
    engine, worker = opened(run=RUN)
    worker.ask(m.Rewind, step=0)
    collator = Worker(engine, "collator")
    lease = collator.ask(m.LeaseBlock).lease
    before = engine.partitions["p"].charged
    collator.ask(m.Put, {}, ids=[], lease=lease, tombstones={0: "a" * 1000, 1: "b" * 1000})
    assert engine.partitions["p"].charged - before >= cost_of_reasons(2, 2000)


def test_slots_are_counted() -> None:
    engine, worker = opened(run=RUN)
    part = engine.partitions["p"]
    worker.ask(m.Rewind, step=0)
    before = part.overhead
    teacher = Worker(engine, "teacher")
    public = engine.sessions.get(worker.session).public_id
    teacher.ask(m.AnnounceRing, teacher=0, rank=0, trainer=public, handle=b"")
    assert part.overhead - before == RUN.slots * SLOT_BYTES


def test_a_full_account_has_no_room_for_any_put() -> None:
    engine, worker = opened(m.TaskDef(name="a", requires=["x"]))
    assert worker.ask(m.Room, bytes=1).room > 1
    part = engine.partitions["p"]
    part.kinds.update(
        {f"field {i}": ("dense", "uint8", ()) for i in range(engine.budget.limits["samples"] // FIELD_BYTES)}
    )
    engine.charge_partitions()
    assert worker.ask(m.Room, bytes=1) is None


def test_columns_are_counted() -> None:
    store = Store()
    store.put([1, 2], {"x": column(2), "y": column(2)}, [1, 2])
    store.put([3], {"x": column(1)}, [3])
    assert store.overhead == 3 * ENTRY_BYTES + 3 * COLUMN_BYTES + 2 * BATCH_BYTES
    store.drop([1])
    store.drop([3])
    assert store.overhead == ENTRY_BYTES + 2 * COLUMN_BYTES + BATCH_BYTES
    store.drop([2])
    assert store.overhead == 0


def test_a_buffer_of_the_smallest_size_is_compacted() -> None:
    store = Store()
    store.put(range(8), {"x": column(8, COMPACT_BYTES // 8)}, range(8))
    store.drop(range(7))
    assert store.nbytes == COMPACT_BYTES // 8 == 8192


def test_finished_intervals_are_counted() -> None:
    samples = OrderedSamples([Task("t", frozenset({"x"}))])
    sizes = []
    for i in (0, 10, 20):
        samples.produce([i], ["x"])
        samples.claim_next("s", "t", 1)
        samples.finish("t", [i])
        sizes.append(samples.overhead)
    assert [after - before for before, after in pairwise(sizes)] == [INTERVAL_BYTES] * 2


def test_volatile_fields_are_counted_as_long_as_their_samples_are_held() -> None:
    part = TaskPartition(
        m.OpenPartition(
            id="r", session="s", partition="p", tasks=[m.TaskDef(name="t", requires=["x"])], volatile=["x"]
        ),
        Sessions(),
    )
    request = m.Put(id="r", session="s", partition="p", ids=[0, 1, 2], columns=[])
    part.put(request, {"x": column(3)}, 1000)
    assert volatile_bytes(part) == 3 * VOLATILE_BYTES
    for i in range(3, 2 * SPARE_ENTRIES):
        part.put(msgspec.structs.replace(request, ids=[i]), {"x": column(1)}, 1000)
        part.drop([i])
    assert volatile_bytes(part) <= (SPARE_ENTRIES + 6) * VOLATILE_BYTES
    part.session_ended("s")
    assert volatile_bytes(part) == 0


def volatile_bytes(part: TaskPartition) -> int:
    return part.overhead - part.samples.overhead - part.store.overhead - len(part.kinds) * FIELD_BYTES


def test_volatile_entries_are_pruned_by_the_samples_held() -> None:
    fields = [f"v{i}" for i in range(4)]
    part = TaskPartition(m.OpenPartition(id="r", session="s", partition="p", tasks=[], volatile=fields), Sessions())
    held = list(range(SPARE_ENTRIES))
    part.samples.produce(held, fields)
    part.own_volatile("s", [(i, name) for i in held for name in fields])
    part.own_volatile("s", [(-1 - i, "v0") for i in held])  # of samples that are not held
    assert volatile_bytes(part) == 5 * SPARE_ENTRIES * VOLATILE_BYTES, (
        "fewer than twice the entries of the samples held"
    )


def test_replies_are_charged_and_replaced() -> None:
    budget = Budget(1 << 20)
    cache = ReplyCache(budget)
    short = Response(m.Claimed(lease=1, ids=[1], dead=[]))
    long = Response(m.Claimed(lease=2, ids=list(range(100)), dead=[]))
    for number, response in enumerate((short, long, short, short)):
        cache.put("s", f"lane.{number}", response)
        assert budget.bytes["replies"] == cost_of_reply(response.reply)
    assert cache.get("s", "lane.4") is None
    assert cache.get("s", "lane.3").reply == short.reply
    cache.drop("t")
    assert budget.bytes["replies"] == cost_of_reply(short.reply)
    cache.drop("s")
    assert budget.bytes["replies"] == 0


def test_a_late_copy_of_a_request_changes_nothing() -> None:
    engine, worker = opened(m.TaskDef(name="a", requires=["x"]))
    at = {"session": worker.session, "partition": "p"}
    worker.ask(m.Put, {"x": column(2)}, ids=[1, 2])
    worker.ask(m.Claim, task="a", count=2)
    worker.number = 9
    waits = m.Claim(id="lane.9", **at, task="a", count=1, wait_s=5.0)
    assert engine.handle(waits, []) is None
    assert worker.ask(m.Ack, task="a", ids=[1]) == m.Ok()
    worker.ask(m.Put, {"x": column(1)}, ids=[3])
    for waited in (False, True):
        with pytest.raises(QueueError, match=r"lane\.9 comes after lane\.11 was answered") as refused:
            engine.handle(waits, [], waited=waited)
        assert refused.value.code == "bad_request"
    assert worker.ask(m.Claim, task="a", count=2).ids == [3]


def test_the_heaviest_session_loses_its_oldest_replies() -> None:
    budget = Budget(1 << 20)
    budget.limits["replies"] = 50_000
    cache = ReplyCache(budget)
    cache.put("light", "a.1", Response(m.Ok()))
    for lane in range(40):
        cache.put("heavy", f"{lane}.1", Response(m.Claimed(lease=lane, ids=list(range(20)), dead=[])))
        assert budget.bytes["replies"] <= 50_000
    kept = [lane for lane in range(40) if cache.get("heavy", f"{lane}.1") is not None]
    assert kept == list(range(kept[0], 40)) and len(kept) > 5
    assert cache.get("light", "a.1") is not None


def test_lease_ages_are_counted_up_to_each_bound() -> None:
    engine, worker = opened(m.TaskDef(name="a", requires=["x"]))
    worker.ask(m.Put, {"x": column(2)}, ids=[1, 2])
    worker.ask(m.Claim, task="a", count=1)
    engine_time[0] += 6.0
    worker.ask(m.Claim, task="a", count=1)
    reply = engine.handle(m.Stats(id="stats", session=worker.session), []).reply
    ages = msgspec.json.decode(reply.document)["partitions"]["p"]["lease_ages"]
    assert ages == {"1": 1, "5": 1, "15": 2, "60": 2, "300": 2, "1800": 2, "7200": 2, "inf": 2}


def test_the_length_of_a_ready_queue() -> None:
    queue = ReadyQueue()
    queue.extend([1, 2, 3], [10, 20, 30])
    queue.add(4, 15)
    assert (queue.pop(), len(queue)) == ((10, 1), 3)
    assert (queue.pop(), len(queue)) == ((15, 4), 2)
    queue.clear()
    queue.extend([5], [50])
    assert (len(queue), queue.pop()) == (1, (50, 5))


def test_a_cleared_partition_has_no_order() -> None:
    samples = OrderedSamples([Task("t", frozenset({"x"}), "strict")])
    samples.produce([1, 2], ["x"])
    samples.clear()
    assert samples.queue_entries == 0


def test_every_task_starts_over() -> None:
    tasks = [Task("a", frozenset({"x"}), "by_id"), Task("b", frozenset({"x"}), "strict")]
    samples = OrderedSamples(tasks)
    samples.produce([1, 2], ["x"])
    samples.claim_next("s", "b", 2)
    samples.finish("b", [1, 2])
    samples.reset()
    assert samples.claim_next("s", "b", 3).ids == (1, 2)


def test_an_order_is_rebuilt_without_stale_entries() -> None:
    samples = OrderedSamples([Task("t", frozenset({"x"}), "arrival")])
    samples.produce([1, 2, 3], ["x"])
    samples.rebuild_ready_queues()
    assert samples.queue_entries == 3
    assert samples.claim_next("s", "t", 4).ids == (1, 2, 3)


def test_a_claim_that_cannot_be_read_leaves_an_earlier_lease() -> None:
    engine, worker = opened(m.TaskDef(name="a", requires=["x"]))
    worker.ask(m.Put, {"x": column(1)}, ids=[1])
    lease = worker.ask(m.Claim, task="a", ids=[1]).lease
    with pytest.raises(QueueError, match="has no field 'y'"):
        worker.ask(m.Claim, task="a", ids=[1], fields=["y"])
    assert engine.partitions["p"].lease_ids() == [lease]


def test_a_tombstone_of_the_first_position_outlives_a_rewind_to_it() -> None:
    run = make_run()
    put(run)
    block = leased(run)
    put_block(run, block.lease, [3], {2: "empty"})
    rewind(run, step=1)
    assert (dict(run.skipped), rows(run, 1)) == ({2: "empty"}, [3])
    assert run.finished.first_gap() == 3
