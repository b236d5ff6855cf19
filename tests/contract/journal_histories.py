"""Random histories of a run's queue, the records that they leave, and what a restart must bring back of them."""

import array
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from xtoken_core.queue.any_partition import any_partition
from xtoken_core.queue.engine import Engine
from xtoken_core.queue.partition import PriorLease
from xtoken_core.queue.run.partition import RunPartition
from xtoken_core.queue.run.slots import SlotState
from xtoken_core.wire import Column, QueueError, pack_columns
from xtoken_core.wire import messages as m
from xtoken_services.queue import log_records as r
from xtoken_services.queue.replay import apply

SIZES: list[dict[str, int]] = [
    {"samples_per_step": 2, "block_size": 2, "span": 6, "prompts": 2, "max_staleness": 1},
    {"samples_per_step": 4, "block_size": 2, "span": 12, "prompts": 2, "max_staleness": 2},
    {"samples_per_step": 2, "block_size": 2, "span": 7},
    {"samples_per_step": 4, "block_size": 4, "span": 14, "teachers": 0},
    {"samples_per_step": 4, "block_size": 1, "span": 13, "prompts": 1, "max_staleness": 1},
    {"samples_per_step": 4, "block_size": 1, "span": 13, "prompts": 1, "last_prompts": 4, "after": 1},
    {"samples_per_step": 4, "block_size": 2, "span": 13, "group": 1, "groups": 2},
]
ROLES = {"collator": "collator", "rollout": "rollout", "teacher": "teacher", "trainer": "trainer"}
ACTIONS = (
    "lease_block", "put", "put", "put", "nack_block", "teach", "teach", "claim_batch", "claim_batch", "nack", "nack",
    "end_step", "end_step", "rewind", "publish", "new_trainer", "end_session", "give_up",
)  # fmt: skip
WEIGHTS = [1.0] * (len(ACTIONS) - 1) + [0.02]
SIGNAL = "teacher_0_full_logits_ipc"


class Records:
    """Records in the order in which they were written, as they come out of a file."""

    def __init__(self, entries: Iterable[r.Entry] = ()) -> None:
        self.entries: list[tuple[bytes, list[bytes]]] = []
        for head, buffers in entries:
            self.append(head, buffers)

    def append(self, head: r.Record, buffers: Sequence[Any]) -> None:
        """Add a record as its bytes."""
        self.entries.append((msgspec.msgpack.encode(head), [bytes(buffer) for buffer in buffers]))


def empty_engine() -> Engine:
    """Return an engine without partitions."""
    return Engine(memory_limit=1 << 24, clock=lambda: 0.0, opens=any_partition)


def replayed(*parts: Records) -> Engine:
    """Return an engine that has read these records."""
    engine = empty_engine()
    apply(engine, [entry for part in parts for entry in part.entries])
    return engine


def durable(engine: Engine) -> dict[str, Any]:
    """Return what a restart must bring back of a run."""
    part = engine.partitions["run"]
    assert isinstance(part, RunPartition)
    run, rows = part.run, {}
    for sample in sorted(part.samples.samples.values(), key=lambda sample: sample.id):
        fields = sorted(sample.fields - {SIGNAL})
        heads, buffers = pack_columns(part.store.read([sample.id], fields))
        rows[sample.id] = (sample.attempts, [head.name for head in heads], [bytes(buffer) for buffer in buffers])
    held = {name for _, names, _ in rows.values() for name in names}
    return {
        "step": run.cursor, "skipped": dict(run.skipped), "dead": dict(run.samples.dead), "failed": run.failed,
        "finished": list(run.finished.intervals()), "done": list(run.blocks.done.intervals()),
        "refused": dict(sorted(run.blocks.refused.items())), "rows": rows,
        "kinds": {name: kind for name, kind in sorted(part.kinds.items()) if name in held},
    }  # fmt: skip


class Workers:
    """Workers of a run and their queue.

    Attributes:
        records: Everything that the journal got.
        base: The latest snapshot.
        tail: What the journal got since then.
    """

    def __init__(self, run: dict[str, int], max_attempts: int = 1) -> None:
        self.engine = empty_engine()
        self.engine.on_change = self._record
        self.records, self.base, self.tail = Records(), Records(), Records()
        self.number = 0
        self.session: dict[str, str] = {}
        self.incarnation = dict.fromkeys(ROLES, 0)
        for worker in ROLES:
            self.hello(worker)
        sizes = {"positions": 18, "teachers": 1, "ranks": 1, "slots": 2, "max_dead": 30}
        definition = m.RunDef(**{**sizes, **run}, document=b"{}")
        self.ask("collator", m.OpenPartition, tasks=[], run=definition, max_attempts=max_attempts)
        self.ask("trainer", m.Rewind, step=0)
        self.snapshot()

    def _record(self, request: m.Request, buffers: Sequence[Any], prior: PriorLease) -> None:
        entry = r.record_of(self.engine, request, buffers, prior)
        if entry is not None:
            self.records.append(*entry)
            self.tail.append(*entry)

    def snapshot(self) -> None:
        """Begin a new file of the journal."""
        self.base, self.tail = Records(r.snapshot(self.engine)), Records()

    def restarts(self) -> dict[str, Engine]:
        """Return the engines that the queue could be started again as."""
        again = replayed(Records(r.snapshot(self.engine)))
        return {
            "all records": replayed(self.records),
            "a snapshot": again,
            "a snapshot after that": replayed(Records(r.snapshot(again))),
            "an earlier snapshot and the records since": replayed(self.base, self.tail),
        }

    @property
    def part(self) -> RunPartition:
        """Return the run's partition."""
        part = self.engine.partitions["run"]
        assert isinstance(part, RunPartition)
        return part

    def ask(self, worker: str, kind: type[Any], columns: dict[str, Column] | None = None, **fields: Any) -> Any:
        """Return the reply to a request; None if it has to wait or is refused."""
        self.number += 1
        heads, buffers = pack_columns(columns or {})
        named: dict[str, Any] = {} if columns is None else {"columns": heads}
        if kind is not m.Hello:
            named |= {"session": self.session[worker], "partition": "run"}
        request = kind(id=f"{worker}.{self.number}", **named, **fields)
        try:
            response = self.engine.handle(m.decode_request(m.encode(request)), [bytes(b) for b in buffers])
        except QueueError:
            return None
        return None if response is None else response.reply

    def hello(self, worker: str) -> None:
        """Connect a newer incarnation of a worker."""
        self.incarnation[worker] += 1
        welcome = self.ask(worker, m.Hello, versions=[m.VERSION], name=worker, role=ROLES[worker],
                           incarnation=self.incarnation[worker], rank=0)  # fmt: skip
        self.session[worker] = welcome.session

    def put_block(
        self, worker: str, block: m.Block, tombstones: Mapping[int, str] | None = None, *,
        names: Sequence[str] = ("input_ids",), value: int = 0,
    ) -> None:  # fmt: skip
        """Put a leased block: a row for every position without a tombstone."""
        ids = [p for p in range(block.first, block.first + block.count) if p not in (tombstones or {})]
        values = memoryview(array.array("q", [p + 100 * value for p in ids])).cast("B")
        columns = {name: Column("dense", "int64", len(ids), (), values) for name in names}
        self.ask(worker, m.Put, columns, ids=ids, lease=block.lease, tombstones=dict(tombstones or {}))

    def ring(self) -> int:
        """Return the number of the ring that teacher and trainer share; 0 if there can be none."""
        run = self.part.run
        if (0, 0) not in run.rings.by_pair:
            found = self.ask("teacher", m.AwaitTrainer, rank=0)
            if found is None:
                return 0
            self.ask("teacher", m.AnnounceRing, teacher=0, rank=0, trainer=found.trainer, handle=b"")
        ring = run.rings.by_pair.get((0, 0))
        if ring is None:
            return 0
        self.ask("trainer", m.OpenedRing, teacher=0, ring=ring.id)
        return ring.id

    def claim_slot(self, ids: list[int]) -> m.Claimed | None:
        """Let the teacher claim a micro-batch."""
        claimed = self.ask("teacher", m.ClaimSlot, ring=self.ring(), rewinds=self.part.run.rewinds, ids=ids)
        return claimed if isinstance(claimed, m.Claimed) else None

    def claim_batch(self, ids: list[int]) -> m.Claimed | None:
        """Let the trainer claim a micro-batch."""
        claimed = self.ask("trainer", m.ClaimBatch, rewinds=self.part.run.rewinds, ids=ids)
        return claimed if isinstance(claimed, m.Claimed) else None

    def release(self, slots: Iterable[m.SlotRef]) -> None:
        """Let the trainer release slots."""
        for slot in slots:
            self.ask("trainer", m.Release, ring=slot.ring, slot=slot.slot, generation=slot.generation)

    def train(self, position: int) -> None:
        """Teach a position and train on it."""
        claimed = self.claim_slot([position])
        if claimed is not None:
            self.ask("teacher", m.Complete, lease=claimed.lease)
        read = self.claim_batch([position])
        if read is not None:
            self.release(read.slots)

    def acknowledge(self) -> None:
        """Acknowledge the current step."""
        self.ask("trainer", m.AckWindow, step=self.part.run.cursor, rewinds=self.part.run.rewinds)

    def publish(self) -> None:
        """Publish the weights of the current step."""
        self.ask("trainer", m.Publish, step=self.part.run.cursor, rewinds=self.part.run.rewinds, tag=7)


class History(Workers):
    """Workers who do random things."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.blocks: list[tuple[str, m.Block]] = []
        self.leases: list[tuple[str, m.Claimed]] = []
        sizes = {**SIZES[seed % len(SIZES)], "max_dead": self.rng.choice([3, 30])}
        super().__init__(sizes, self.rng.choice([1, 2]))

    def act(self) -> None:
        """Do something at random."""
        (action,) = self.rng.choices(ACTIONS, WEIGHTS)
        getattr(self, f"_{action}")()
        if self.rng.random() < 0.1:
            self.snapshot()

    def _lease_block(self) -> None:
        worker = self.rng.choice(["collator", "rollout"])
        block = self.ask(worker, m.LeaseBlock)
        if block is not None:
            self.blocks.append((worker, block))

    def _leased_block(self) -> tuple[str, m.Block] | None:
        self._lease_block()
        return self.blocks.pop(self.rng.randrange(len(self.blocks))) if self.blocks else None

    def _put(self) -> None:
        leased = self._leased_block()
        if leased is not None:
            worker, block = leased
            positions = range(block.first, block.first + block.count)
            tombstones = {p: self.rng.choice(["long", "empty"]) for p in positions if self.rng.random() < 0.15}
            names = ["input_ids", *(["extra"] if self.rng.random() < 0.3 else [])]
            self.put_block(worker, block, tombstones, names=names, value=self.rng.randrange(100))

    def _nack_block(self) -> None:
        leased = self._leased_block()
        if leased is not None:
            self.ask(leased[0], m.Nack, lease=leased[1].lease, ids=[], reason=self.rng.choice(["io", "gone"]))

    def _batch(self) -> list[int]:
        run = self.part.run
        step = max(0, run.cursor + self.rng.choice([0, 0, 0, 1]))
        held = [p for p in run.window(step) if p in run.samples.samples]
        return held[:2] if self.rng.random() < 0.5 else held[2:] or held

    def _teach(self) -> None:
        claimed = self.claim_slot(self._batch())
        if claimed is not None:
            self.leases.append(("teacher", claimed))
            if self.rng.random() < 0.7:
                self.ask("teacher", m.Complete, lease=claimed.lease)

    def _claim_batch(self) -> None:
        claimed = self.claim_batch(self._batch())
        if claimed is not None:
            self.leases.append(("trainer", claimed))
            self.release(slot for slot in claimed.slots if self.rng.random() < 0.8)

    def _nack(self) -> None:
        held = [(w, c) for w, c in self.leases if c.lease in self.part.samples.leases]
        if held:
            worker, claimed = self.rng.choice(held)
            ids = [i for i in claimed.ids if self.rng.random() < 0.7]
            self.ask(worker, m.Nack, lease=claimed.lease, ids=ids, reason=self.rng.choice(["nan", "refused"]))

    def _end_step(self) -> None:
        """Acknowledge the step, mostly after what it lacks."""
        run = self.part.run
        if self.rng.random() < 0.7:
            self.publish()
            for _ in range(6):
                self._put()
            for ring in run.rings.by_pair.values():
                for index, slot in enumerate(ring.slots):
                    if slot.state == SlotState.READING:
                        self.release([m.SlotRef(teacher=0, ring=ring.id, slot=index, generation=slot.generation)])
            for position in [p for p in run.window(run.cursor) if p in run.samples.samples]:
                self.train(position)
        self.acknowledge()

    def _publish(self) -> None:
        self.publish()

    def _rewind(self) -> None:
        run = self.part.run
        step = max(0, run.cursor + self.rng.choice([-3, -2, -1, -1, 0, 0, 1]))
        start = step * run.samples_per_step
        known = [
            {p: why for p, why in reasons.items() if p < start or self.rng.random() < 0.2}
            for reasons in (run.skipped, run.samples.dead)
        ]
        if self.rng.random() < 0.2 and start:
            known[self.rng.randrange(2)][self.rng.randrange(start)] = "of a checkpoint"
        self.ask("trainer", m.Rewind, step=step, skipped=known[0], dead=known[1])

    def _new_trainer(self) -> None:
        self.hello("trainer")
        self._rewind()

    def _end_session(self) -> None:
        self.hello(self.rng.choice(["collator", "rollout", "teacher"]))

    def _give_up(self) -> None:
        self.ask("trainer", m.Giveup, reason="enough")
