"""The calls of a run's pipeline, by workers that are played here: collator, teacher, trainer."""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.contract.peers import Place, code_of, ints, public_id
from tests.contract.reference_client import RefusedError

WAIT_S = 10.0


@dataclass
class Run:
    """A run's partition and its workers; steps of 4 positions, blocks of 2, a span of 12, 2 slots."""

    place: Place
    partition: str
    collator: Any
    count: int = 0

    def put_block(self, **tombstones: str) -> list[int]:
        """Lease the lowest block and put its rows; positions named `p3="why"` become tombstones."""
        block = self.collator.call("lease_block", partition=self.partition)
        skipped = {int(name[1:]): reason for name, reason in tombstones.items()}
        ids = [p for p in range(block["first"], block["first"] + block["count"]) if p not in skipped]
        rows = {"input_ids": ints(*([p, p + 1] for p in ids))}
        self.collator.call(
            "put", partition=self.partition, ids=ids, columns=rows, lease=block["lease"], tombstones=skipped
        )
        return ids

    def trainer(self, step: int = 0, incarnation: int = 1, **known: Any) -> Any:
        """A trainer that has rewound the run."""
        peer = self.place.worker("trainer", name=f"trainer-{self.partition}", incarnation=incarnation)
        self.count = peer.call("rewind", partition=self.partition, step=step, **known)["rewinds"]
        return peer

    def teacher(self, trainer: Any, incarnation: int = 1) -> tuple[Any, int]:
        """A teacher whose ring the trainer has opened."""
        peer = self.place.worker("teacher", name=f"teacher-{self.partition}", incarnation=incarnation)
        found = peer.call("await_trainer", partition=self.partition, rank=0, wait_s=WAIT_S)
        assert (found["trainer"], found["rewinds"]) == (public_id(trainer.session), self.count)
        ring = peer.call(
            "announce_ring", partition=self.partition, teacher=0, rank=0, trainer=found["trainer"], handle=b"\1\2"
        )["ring"]
        seen = trainer.call("await_ring", partition=self.partition, teacher=0, wait_s=WAIT_S)
        assert (seen["ring"], seen["handle"]) == (ring, b"\1\2")
        trainer.call("opened_ring", partition=self.partition, teacher=0, ring=ring)
        assert peer.call("await_opened", partition=self.partition, ring=ring, wait_s=WAIT_S) is not None
        return peer, ring

    def started(self, blocks: int = 0) -> tuple[Any, Any, int]:
        """A trainer, and a teacher with its ring; then the rows of so many blocks."""
        trainer = self.trainer()
        teacher, ring = self.teacher(trainer)
        for _ in range(blocks):
            self.put_block()
        return trainer, teacher, ring

    def fill(self, teacher: Any, ring: int, *ids: int, **options: Any) -> Any:
        """Claim a slot for a micro-batch."""
        return teacher.call(
            "claim_slot", partition=self.partition, ring=ring, rewinds=self.count, ids=list(ids), **options
        )

    def publish(self, teacher: Any, ring: int, *ids: int) -> Any:
        """Claim a slot and complete it."""
        claim = self.fill(teacher, ring, *ids)
        teacher.call("complete", partition=self.partition, lease=claim["lease"])
        return claim

    def batch(self, trainer: Any, *ids: int, **options: Any) -> Any:
        """Claim a micro-batch for training."""
        return trainer.call("claim_batch", partition=self.partition, rewinds=self.count, ids=list(ids), **options)

    def read(self, trainer: Any, *ids: int) -> Any:
        """Claim a micro-batch and release its slots."""
        claim = self.batch(trainer, *ids)
        for ref in claim["slots"]:
            slot = {name: ref[name] for name in ("ring", "slot", "generation")}
            trainer.call("release", partition=self.partition, **slot)
        return claim

    def verdict(self, trainer: Any, step: int, *dead: int) -> bool:
        """What `check_step` says."""
        reply = trainer.call("check_step", partition=self.partition, step=step, rewinds=self.count, dead=list(dead))
        return bool(reply["redo"])


@pytest.fixture
def run(place: Place) -> Run:
    return opened(place)


def opened(place: Place, **changes: Any) -> Run:
    collator, name = place.worker("collator"), place.name("run")
    definition: dict[str, Any] = {
        "positions": 10, "samples_per_step": 4, "block_size": 2, "span": 12, "teachers": 1, "ranks": 1, "slots": 2,
        "document": b'{"run": 1}', **changes,
    }  # fmt: skip
    collator.call("open", partition=name, tasks=[], run=definition, max_attempts=2)
    return Run(place, name, collator)


def test_blocks_go_out_in_order_and_within_the_span(place: Place) -> None:
    run = opened(place, positions=40)
    other = place.worker("collator")
    first = run.collator.call("lease_block", partition=run.partition)
    second = other.call("lease_block", partition=run.partition)
    assert [(b["first"], b["count"]) for b in (first, second)] == [(0, 2), (2, 2)]
    other.call("bye")
    assert [run.put_block() for _ in range(5)] == [[2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert run.collator.call("lease_block", partition=run.partition, wait_s=0.05) is None
    run.collator.call("nack", partition=run.partition, lease=first["lease"], ids=[], reason="later")
    assert run.put_block(p0="no text", p1="no text") == []
    assert run.put_block() == [12, 13]


def test_a_block_must_be_whole(run: Run) -> None:
    block = run.collator.call("lease_block", partition=run.partition)
    put = {"partition": run.partition, "lease": block["lease"]}
    row = {"input_ids": ints([1])}
    assert code_of(run.collator, "put", ids=[0], columns=row, **put) == "bad_request"
    assert code_of(run.collator, "put", ids=[0], columns=row, tombstones={0: "x", 1: "y"}, **put) == "bad_request"
    assert code_of(run.collator, "put", ids=[5], columns=row, tombstones={1: "y"}, **put) == "bad_request"
    assert code_of(run.collator, "put", ids=[0], columns={"z": ints([1])}, tombstones={1: "y"}, **put) == "bad_request"
    run.collator.call("put", ids=[0], columns=row, tombstones={1: "y"}, **put)
    assert code_of(run.collator, "put", ids=[0], columns=row, tombstones={1: "y"}, **put) == "lease_revoked"
    skipped = run.collator.call("list", partition=run.partition, state="skipped")
    assert (skipped["ids"], skipped["reasons"]) == ([1], {1: "y"})


def test_generic_calls_are_forbidden_in_a_run(run: Run) -> None:
    name = run.partition
    assert code_of(run.collator, "put", partition=name, ids=[0], columns={"x": ints([1])}) == "forbidden"
    assert code_of(run.collator, "claim", partition=name, task="train", count=1) == "forbidden"
    assert code_of(run.collator, "ack", partition=name, task="train", ids=[0]) == "forbidden"
    assert code_of(run.collator, "clear", partition=name, ids=[0]) == "forbidden"
    assert code_of(run.place.worker("trainer"), "lease_block", partition=name) == "forbidden"
    assert code_of(run.collator, "rewind", partition=name, step=0) == "forbidden"


def test_a_window_waits_for_all_its_positions(run: Run) -> None:
    trainer = run.trainer()
    ask = {"partition": run.partition, "step": 0, "rewinds": run.count, "fields": ["input_ids"]}
    run.put_block()
    assert trainer.call("window", wait_s=0.05, **ask) is None
    run.put_block(p2="empty document")
    window = trainer.call("window", wait_s=WAIT_S, **ask)
    assert (window["ids"], window["skipped"], window.get("dead", [])) == ([0, 1, 3], [2], [])
    assert window["columns"] == {"input_ids": ints([0, 1], [1, 2], [3, 4])}


def bits(*rows: int) -> Any:
    """A dense int64 column."""
    return ("dense", "int64", (), [row.to_bytes(8, "little", signed=True) for row in rows])


def test_a_micro_batch_waits_for_the_teachers_of_its_rows_only(place: Place) -> None:
    run = opened(place, teachers=2)
    for _ in range(2):
        block = run.collator.call("lease_block", partition=run.partition)
        ids = [block["first"], block["first"] + 1]
        columns = {"input_ids": ints([1], [2]), "teachers": bits(0b01, 0b10)}
        run.collator.call("put", partition=run.partition, ids=ids, columns=columns, lease=block["lease"])
    trainer, teacher, ring = run.started()
    run.publish(teacher, ring, 0, 2)
    assert [slot["teacher"] for slot in run.batch(trainer, 0, 2)["slots"]] == [0]
    assert run.batch(trainer, 1, 3, wait_s=0.05) is None


@pytest.mark.parametrize(
    "column", [ints([1], [1]), ("dense", "int32", (), [b"\1\0\0\0"] * 2), bits(1, 0), bits(1, 4), bits(1, -1)],
    ids=["jagged", "int32", "no-teacher", "third-of-two", "negative"],
)  # fmt: skip
def test_rows_of_other_teachers_than_the_run_has_are_refused(place: Place, column: Any) -> None:
    run = opened(place, teachers=2)
    block = run.collator.call("lease_block", partition=run.partition)
    put = {"partition": run.partition, "ids": [0, 1], "lease": block["lease"]}
    columns = {"input_ids": ints([1], [2]), "teachers": column}
    assert code_of(run.collator, "put", columns=columns, **put) == "bad_request"
    run.collator.call("put", columns=columns | {"teachers": bits(1, 3)}, **put)


def test_a_whole_run(run: Run) -> None:
    trainer, teacher, ring = run.started()
    trained: list[int] = []
    for step, window in enumerate(([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])):
        while trainer.call("window", partition=run.partition, step=step, rewinds=run.count, fields=[]) is None:
            run.put_block()
        for first in window[::2]:
            claim = run.publish(teacher, ring, first, first + 1)
            assert claim["ids"] == [first, first + 1]
            batch = run.batch(trainer, first, first + 1, fields=["input_ids"])
            slot = {"ring": ring, "slot": claim["slot"], "generation": claim["generation"]}
            assert batch["slots"] == [{"teacher": 0, **slot}]
            assert batch["columns"]["input_ids"] == ints([first, first + 1], [first + 1, first + 2])
            assert run.read(trainer, first, first + 1)["lease"] == batch["lease"]
            trained += batch["ids"]
        assert run.verdict(trainer, step) is False
        for _ in range(2):
            trainer.call("ack_window", partition=run.partition, step=step, rewinds=run.count)
    assert trained == list(range(10))
    assert code_of(run.collator, "lease_block", partition=run.partition) == "exhausted"
    assert code_of(trainer, "window", partition=run.partition, step=3, rewinds=run.count, fields=[]) == "exhausted"
    assert code_of(teacher, "await_trainer", partition=run.partition, rank=0) == "exhausted"
    assert code_of(trainer, "peek", partition=run.partition, sample=9) == "unknown_sample"


def test_released_slots_are_filled_again(run: Run) -> None:
    trainer, teacher, ring = run.started(2)
    first, second = run.publish(teacher, ring, 0), run.publish(teacher, ring, 1)
    assert (first["slot"], second["slot"]) == (0, 1)
    assert run.fill(teacher, ring, 2, wait_s=0.05) is None
    run.batch(trainer, 0)
    old = {"partition": run.partition, "ring": ring, "slot": 0, "generation": first["generation"]}
    trainer.call("release", **{**old, "generation": first["generation"] + 1})
    assert run.fill(teacher, ring, 2) is None
    trainer.call("release", **old)
    third = run.fill(teacher, ring, 2, wait_s=WAIT_S)
    assert (third["slot"], third["generation"]) == (0, first["generation"] + 1)
    trainer.call("release", **old)
    assert run.fill(teacher, ring, 2)["lease"] == third["lease"]
    assert run.fill(teacher, ring, 0)["type"] == "already_done"


def test_a_signal_goes_with_its_teacher(run: Run) -> None:
    trainer, teacher, ring = run.started(2)
    run.publish(teacher, ring, 0, 1)
    run.publish(teacher, ring, 2, 3)
    run.batch(trainer, 0, 1)
    teacher.call("bye")
    assert run.verdict(trainer, 0) is True
    assert run.batch(trainer, 2, 3, wait_s=0.05) is None
    trainer.call("rewind", partition=run.partition, step=0)
    run.count += 1
    teacher, ring = run.teacher(trainer, incarnation=2)
    for ids in ((0, 1), (2, 3)):
        run.publish(teacher, ring, *ids)
        run.read(trainer, *ids)
    assert run.verdict(trainer, 0) is False
    trainer.call("ack_window", partition=run.partition, step=0, rewinds=run.count)


def test_rewind_ends_older_trainers(run: Run) -> None:
    old, teacher, ring = run.started(4)
    claim = run.fill(teacher, ring, 0, 1)
    before = run.count
    new = run.trainer(step=1, incarnation=2, skipped={0: "told"})
    assert run.count == before + 1
    assert code_of(old, "heartbeat", phase="run") == "stale_session"
    assert code_of(teacher, "complete", partition=run.partition, lease=claim["lease"]) == "lease_revoked"
    with pytest.raises(RefusedError) as refused:
        teacher.call("window", partition=run.partition, step=0, rewinds=before, fields=[])
    assert (refused.value.code, refused.value.detail) == ("rewound", {"step": 1, "rewinds": run.count})
    late = new.call("window", partition=run.partition, step=0, rewinds=run.count, fields=[])
    assert late["type"] == "already_done"
    assert new.call("list", partition=run.partition, state="skipped")["reasons"] == {0: "told"}
    window = new.call("window", partition=run.partition, step=1, rewinds=run.count, fields=["input_ids"])
    assert window["ids"] == [4, 5, 6, 7]
    new.call("rewind", partition=run.partition, step=0)
    run.count += 1
    assert [run.put_block(p0="told"), run.put_block()] == [[1], [2, 3]]


def test_a_ring_closes_with_either_session(run: Run) -> None:
    trainer, teacher, ring = run.started()
    trainer.call("bye")
    assert code_of(teacher, "await_opened", partition=run.partition, ring=ring) == "ring_closed"
    strange = {"partition": run.partition, "teacher": 0, "rank": 0, "trainer": "nobody", "handle": b""}
    assert code_of(teacher, "announce_ring", **strange) == "ring_closed"
    assert code_of(run.collator, "announce_ring", **strange) == "forbidden"


def test_only_the_current_step_can_be_acknowledged(run: Run) -> None:
    trainer = run.trainer()
    for _ in range(4):
        run.put_block()
    for step in (0, 1):
        ack = {"partition": run.partition, "step": step, "rewinds": run.count}
        assert code_of(trainer, "ack_window", **ack) == "conflict"


def test_dead_position_means_redo(place: Place) -> None:
    run = opened(place, max_dead=1)
    trainer, teacher, ring = run.started(2)
    for attempt in range(2):
        claim = run.fill(teacher, ring, 0, 1)
        reason = f"bad record, {attempt}"
        teacher.call("nack", partition=run.partition, lease=claim["lease"], ids=[1], reason=reason)
    assert run.verdict(trainer, 0) is True
    assert run.verdict(trainer, 0, 1) is False
    window = trainer.call("window", partition=run.partition, step=0, rewinds=run.count, fields=["input_ids"])
    assert (window["ids"], window["dead"]) == ([0, 1, 2, 3], [1])
    claim = run.publish(teacher, ring, 0, 1)
    assert (claim["ids"], claim["dead"]) == ([0, 1], [1])
    run.read(trainer, 0, 1)
    run.publish(teacher, ring, 2, 3)
    run.read(trainer, 2, 3)
    trainer.call("ack_window", partition=run.partition, step=0, rewinds=run.count)


def test_too_many_dead_positions_end_the_run(run: Run) -> None:
    for _ in range(2):
        lease = run.collator.call("lease_block", partition=run.partition)["lease"]
        run.collator.call("nack", partition=run.partition, lease=lease, ids=[], reason="cannot be read")
    with pytest.raises(RefusedError, match="cannot be read") as refused:
        run.collator.call("lease_block", partition=run.partition)
    assert refused.value.code == "run_failed"


def test_give_up_fails_all_workers(run: Run) -> None:
    trainer = run.trainer()
    run.collator.call("give_up", partition=run.partition, reason="record 3 is not valid UTF-8")
    ask = {"partition": run.partition, "step": 0, "rewinds": run.count, "fields": []}
    with pytest.raises(RefusedError, match="record 3 is not valid UTF-8"):
        trainer.call("window", wait_s=WAIT_S, **ask)


def test_micro_batches_name_a_sample_once(run: Run) -> None:
    trainer, teacher, ring = run.started(1)
    ask = {"partition": run.partition, "rewinds": run.count, "ids": [0, 0]}
    assert code_of(teacher, "claim_slot", ring=ring, **ask) == "bad_request"
    assert code_of(trainer, "claim_batch", **ask) == "bad_request"


def test_hello_waits_for_a_run_and_carries_it(small_place: Place) -> None:
    early = small_place.connect()
    assert early.hello("c", "collator", 1, needs_run=True, wait_s=0.05) is None
    run = opened(small_place)
    found = early.hello("c", "collator", 1, needs_run=True, wait_s=WAIT_S)
    assert found["partition"] == run.partition
    document = found["run"] if small_place.kind == "reference" else early.client.run_document
    assert document == b'{"run": 1}'
