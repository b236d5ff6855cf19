"""The journal: what was answered is there after the process has died, whenever that was."""

import random
import resource
from pathlib import Path
from typing import Any

import pytest

from tests.contract.peers import LibraryPeer, ints
from tests.contract.reference_client import RefusedError
from tests.contract.test_tasks import state
from tests.support.memory_queue import MemoryQueue
from xtoken_core.errors import ConfigError, InputError, XtokenError
from xtoken_services.queue.journal_file import CHUNK_BYTES, log_of
from xtoken_services.queue.write_ahead_log import WriteAheadLog

TASKS = [{"name": "a", "requires": ["x"]}, {"name": "b", "requires": ["x", "v"]}]
SLACK = 1 << 18


class Kept:
    """A queue in memory with a journal that is committed after every request, and how it is started again."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.directory, self.options = directory, {"slack": SLACK, **options}
        self.count = 0
        self.start()

    def start(self) -> None:
        self.queue = MemoryQueue()
        self.journal = WriteAheadLog(self.directory, self.queue.engine, **self.options)
        self.queue.engine.on_change = self._commit

    def _commit(self, *change: Any) -> None:
        self.journal.record(*change)
        self.journal.commit()

    def worker(self, role: str = "worker") -> LibraryPeer:
        peer = LibraryPeer(self.queue.connect())
        self.count += 1
        peer.hello(f"w{self.count}", role, self.count)
        return peer

    def restart(self) -> LibraryPeer:
        self.journal.close()
        self.start()
        return self.worker()


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "journal")


def test_a_generic_partition_comes_back(kept: Kept) -> None:
    peer = kept.worker()
    peer.call("open", partition="p", tasks=TASKS, volatile=["v"], max_attempts=2)
    peer.call("put", partition="p", ids=list(range(10)), columns={"x": ints(*([i, i] for i in range(10)))})
    peer.call("put", partition="p", ids=[0, 1, 2], columns={"v": ints([1], [1], [1]), "w": ints([0], [1], [2])})
    for _ in range(2):
        lease = peer.call("claim", partition="p", task="a", ids=[9, 8])["lease"]
        peer.call("nack", partition="p", lease=lease, ids=[9], reason="bad")
    assert peer.call("claim", partition="p", task="a", count=4)["ids"] == [0, 1, 2, 3]
    peer.call("ack", partition="p", task="a", ids=[0, 1, 3])
    peer.call("clear", partition="p", ids=[7])
    peer.call("seal", partition="p")
    for _ in range(2):
        peer = kept.restart()
        assert state(peer, "p", "a") == {"ready": [2, 4, 5, 6, 8], "done": [0, 1, 3]}
        assert state(peer, "p", "b") == {"waiting": [0, 1, 2, 3, 4, 5, 6, 8]}
        assert peer.call("list", partition="p", state="dead")["reasons"] == {9: "bad"}
        columns = peer.call("get", partition="p", ids=[2, 0], fields=["x", "w"])["columns"]
        assert columns == {"x": ints([2, 2], [0, 0]), "w": ints([2], [0])}
        with pytest.raises(RefusedError, match="sealed"):
            peer.call("put", partition="p", ids=[11], columns={"x": ints([1])})
        with pytest.raises(RefusedError, match="has no"):
            peer.call("get", partition="p", ids=[2], fields=["v"])
    assert peer.call("claim", partition="p", task="a", count=9)["ids"] == [2, 4, 5, 6, 8]


def test_volatile_result_is_lost_at_restart(kept: Kept) -> None:
    peer = kept.worker()
    peer.call("open", partition="p", tasks=TASKS, volatile=["v"])
    peer.call("put", partition="p", ids=[0, 1], columns={"x": ints([0], [1])})
    lease = peer.call("claim", partition="p", task="a", ids=[0])["lease"]
    peer.call("complete", partition="p", lease=lease, columns={"v": ints([5])})
    lease = peer.call("claim", partition="p", task="a", ids=[1])["lease"]
    peer.call("complete", partition="p", lease=lease, columns={"z": ints([5])})
    for _ in range(2):
        peer = kept.restart()
        assert state(peer, "p", "a") == {"ready": [0], "done": [1]}
        assert state(peer, "p", "b") == {"waiting": [0, 1]}
        assert peer.call("get", partition="p", ids=[1], fields=["z"])["columns"] == {"z": ints([5])}


def test_a_task_completed_by_a_volatile_field_that_was_there_is_not_durable(kept: Kept) -> None:
    peer = kept.worker()
    peer.call("open", partition="p", tasks=TASKS, volatile=["v"])
    peer.call("put", partition="p", ids=[0], columns={"x": ints([0])})
    lease = peer.call("claim", partition="p", task="a", ids=[0])["lease"]
    peer.call("put", partition="p", ids=[0], columns={"v": ints([5])})
    peer.call("complete", partition="p", lease=lease, columns={"v": ints([5])})
    for i in range(1, 200):  # until the journal begins with a snapshot of this
        peer.call("put", partition="p", ids=[i], columns={"x": ints([i] * 50)})
        peer.call("clear", partition="p", ids=[i])
    assert state(peer, "p", "a") == {"done": [0]}
    for _ in range(2):
        assert state(kept.restart(), "p", "a") == {"ready": [0]}


def test_acked_volatile_result_is_not_durable(kept: Kept) -> None:
    peer = kept.worker()
    peer.call("open", partition="p", tasks=TASKS, volatile=["v"])
    peer.call("put", partition="p", ids=[0], columns={"x": ints([0])})
    lease = peer.call("claim", partition="p", task="a", ids=[0])["lease"]
    peer.call("complete", partition="p", lease=lease, columns={"v": ints([5])})
    peer.call("ack", partition="p", task="a", ids=[0])
    assert state(kept.restart(), "p", "a") == {"ready": [0]}


def test_what_every_task_has_done_stays_done(kept: Kept) -> None:
    peer = kept.worker()
    peer.call("open", partition="p", tasks=TASKS, volatile=["v"])
    peer.call("put", partition="p", ids=[0, 1], columns={"x": ints([0], [1])})
    lease = peer.call("claim", partition="p", task="a", ids=[0, 1])["lease"]
    peer.call("complete", partition="p", lease=lease, columns={"v": ints([5], [6])})
    lease = peer.call("claim", partition="p", task="b", ids=[0, 1])["lease"]
    peer.call("ack", partition="p", task="b", ids=[0])
    peer.call("complete", partition="p", lease=lease, columns={"z": ints([7])})
    for _ in range(2):
        peer = kept.restart()
        peer.call("put", partition="p", ids=[0, 1], columns={"x": ints([0], [1])})
        assert (state(peer, "p", "a"), state(peer, "p", "b")) == ({}, {})


def test_a_restart_charges_partitions_as_before(kept: Kept) -> None:
    peer = kept.worker()
    for name in ("p", "q", "p"):
        peer.call("open", partition=name, tasks=TASKS)
    charged = kept.queue.engine.budget.bytes["partitions"]
    assert charged > 0
    for _ in range(2):
        kept.restart()
        assert kept.queue.engine.budget.bytes["partitions"] == charged


def test_restart_orders_all_tasks_by_puts(kept: Kept) -> None:
    peer = kept.worker()
    peer.call("open", partition="p", tasks=[{"name": "a", "requires": ["x", "y"], "order": "arrival"}])
    for i in (1, 2):
        peer.call("put", partition="p", ids=[i], columns={"x": ints([i])})
    for i in (2, 1):
        peer.call("put", partition="p", ids=[i], columns={"y": ints([i])})
    assert peer.call("claim", partition="p", task="a", count=2)["ids"] == [2, 1]
    for _ in range(2):
        assert kept.restart().call("claim", partition="p", task="a", count=2)["ids"] == [1, 2]


def test_a_restart_keeps_the_kinds_of_what_is_held(kept: Kept) -> None:
    peer = kept.worker()
    peer.call("open", partition="p", tasks=[{"name": "a", "requires": []}])
    peer.call("put", partition="p", ids=[0], columns={"x": ints([0])})
    peer.call("put", partition="p", ids=[1], columns={"y": ints([0])})
    peer.call("claim", partition="p", task="a", ids=[0])
    peer.call("ack", partition="p", task="a", ids=[0])
    other = ("dense", "uint8", (), [b"1"])
    with pytest.raises(RefusedError, match="'x' is jagged"):
        peer.call("put", partition="p", ids=[2], columns={"x": other})
    peer = kept.restart()
    peer.call("put", partition="p", ids=[2], columns={"x": other})
    with pytest.raises(RefusedError, match="'y' is jagged"):
        peer.call("put", partition="p", ids=[3], columns={"y": other})


def test_failed_flush_stops_the_queue(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = kept.worker()
    peer.call("open", partition="p", tasks=TASKS)

    def refuse(_file: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("xtoken_services.queue.write_ahead_log.os.fdatasync", refuse)
    peer.call("put", partition="p", ids=[0], columns={"x": ints([0])})
    with pytest.raises(XtokenError, match="cannot flush the journal in"):
        kept.journal.sync()
    with pytest.raises(XtokenError, match="cannot flush the journal in"):
        peer.call("put", partition="p", ids=[1], columns={"x": ints([1])})


def test_a_run_comes_back(kept: Kept) -> None:
    run = {
        "positions": 24, "samples_per_step": 4, "block_size": 2, "span": 12, "teachers": 1, "ranks": 1, "slots": 2,
        "max_dead": 4, "document": b"{}",
    }  # fmt: skip
    collator, trainer = kept.worker("collator"), kept.worker("trainer")
    collator.call("open", partition="r", tasks=[], run=run, max_attempts=1)
    rewinds = trainer.call("rewind", partition="r", step=1, skipped={1: "empty"})["rewinds"]

    def put(skip: tuple[int, ...] = ()) -> None:
        block = collator.call("lease_block", partition="r")
        ids = [p for p in range(block["first"], block["first"] + block["count"]) if p not in skip]
        collator.call("put", partition="r", ids=ids, columns={"input_ids": ints(*([p] for p in ids))},
                      lease=block["lease"], tombstones=dict.fromkeys(skip, "empty"))  # fmt: skip

    for skip in ((), (7,), (), ()):
        put(skip)
    lost = collator.call("lease_block", partition="r")["lease"]
    collator.call("nack", partition="r", lease=lost, ids=[], reason="unreadable")
    for _ in range(2):
        peer = kept.restart()
        shown = peer.client.stats()["partitions"]["r"]
        assert (shown["run"]["step"], shown["samples"], shown["dead"]) == (1, 7, 2)
        assert peer.call("list", partition="r", state="skipped")["reasons"] == {1: "empty", 7: "empty"}
        assert peer.call("list", partition="r", state="dead")["reasons"] == dict.fromkeys((12, 13), "unreadable")
        trainer = kept.worker("trainer")
        assert trainer.call("rewind", partition="r", step=1, skipped={1: "empty"})["rewinds"] > rewinds
        rewinds = trainer.call("await_trainer", partition="r", rank=0)["rewinds"]
        window = trainer.call("window", partition="r", step=1, rewinds=rewinds, fields=["input_ids"])
        assert (window["ids"], window["skipped"]) == ([4, 5, 6], [7])
        assert window["columns"] == {"input_ids": ints([4], [5], [6])}
        block = kept.worker("collator").call("lease_block", partition="r")
        assert block["first"] == 14
    trainer.call("give_up", partition="r", reason="enough")
    kept.restart()
    with pytest.raises(RefusedError, match="enough"):
        kept.worker("collator").call("lease_block", partition="r")


class KeptRun:
    """A run with a journal: steps and blocks of 2 positions, one attempt each."""

    def __init__(self, kept: Kept, **changes: Any) -> None:
        self.kept, self.collator = kept, kept.worker("collator")
        sizes = {"positions": 8, "samples_per_step": 2, "block_size": 2, "span": 6, "teachers": 1, "ranks": 1}
        run = {**sizes, "slots": 2, "max_dead": 1, "document": b"{}", **changes}
        self.collator.call("open", partition="r", tasks=[], run=run, max_attempts=1)

    def lease(self) -> dict[str, Any]:
        block: dict[str, Any] = self.collator.call("lease_block", partition="r")
        return block

    def put(self, block: dict[str, Any], **tombstones: str) -> None:
        """Put a leased block; positions named `p3="why"` become tombstones."""
        skipped = {int(name[1:]): reason for name, reason in tombstones.items()}
        ids = [p for p in range(block["first"], block["first"] + block["count"]) if p not in skipped]
        rows = {"input_ids": ints(*([p] for p in ids))}
        self.collator.call("put", partition="r", ids=ids, columns=rows, lease=block["lease"], tombstones=skipped)

    def trainer(self, step: int = 0) -> LibraryPeer:
        """A new trainer that has rewound the run."""
        peer = self.kept.worker("trainer")
        peer.call("rewind", partition="r", step=step)
        self.rewinds = peer.call("await_trainer", partition="r", rank=0)["rewinds"]
        return peer

    def state(self) -> dict[str, Any]:
        """What a restart must not change."""
        run = self.kept.queue.engine.partitions["r"].run
        return {
            "step": run.cursor, "skipped": dict(run.skipped), "dead": dict(run.samples.dead), "failed": run.failed,
            "rows": sorted(run.samples.samples), "done": list(run.blocks.done.intervals()),
        }  # fmt: skip


def test_a_row_s_teachers_come_back_with_it(kept: Kept) -> None:
    run = KeptRun(kept, teachers=2)
    block = run.lease()
    columns = {"input_ids": ints([0], [1]), "teachers": ("dense", "int64", (), [b"\2" + bytes(7)] * 2)}
    run.collator.call("put", partition="r", ids=[0, 1], columns=columns, lease=block["lease"])
    for _ in range(2):
        kept.restart()
        trainer, teacher = run.trainer(), kept.worker("teacher")
        named = teacher.call("await_trainer", partition="r", rank=0)["trainer"]
        ring = teacher.call("announce_ring", partition="r", teacher=1, rank=0, trainer=named, handle=b"")["ring"]
        trainer.call("opened_ring", partition="r", teacher=1, ring=ring)
        claim = teacher.call("claim_slot", partition="r", ring=ring, rewinds=run.rewinds, ids=[0, 1])
        teacher.call("complete", partition="r", lease=claim["lease"])
        batch = trainer.call("claim_batch", partition="r", rewinds=run.rewinds, ids=[0, 1])
        assert [slot["teacher"] for slot in batch["slots"]] == [1], "teacher 0 has nothing to say about these rows"


def test_a_failed_run_comes_back_with_the_blocks_after_the_one_that_failed_it(kept: Kept) -> None:
    run = KeptRun(kept, max_dead=0)
    first, second = run.lease(), run.lease()
    run.put(second)
    run.collator.call("nack", partition="r", lease=first["lease"], ids=[], reason="unreadable")
    before = run.state()
    assert (before["rows"], before["failed"][:14]) == ([2, 3], "2 dead letters")
    for _ in range(3):
        kept.restart()
        assert run.state() == before


def test_a_tombstone_beside_a_dead_row_that_is_gone_stays_one(kept: Kept) -> None:
    run = KeptRun(kept)
    trainer, teacher = run.trainer(), kept.worker("teacher")
    run.put(run.lease(), p0="bad record")
    named = teacher.call("await_trainer", partition="r", rank=0)["trainer"]
    ring = teacher.call("announce_ring", partition="r", teacher=0, rank=0, trainer=named, handle=b"")["ring"]
    trainer.call("opened_ring", partition="r", teacher=0, ring=ring)
    claim = teacher.call("claim_slot", partition="r", ring=ring, rewinds=run.rewinds, ids=[1])
    teacher.call("nack", partition="r", lease=claim["lease"], ids=[1], reason="refused")
    trainer.call("ack_window", partition="r", step=0, rewinds=run.rewinds)
    run.trainer(step=0)
    before = run.state()
    assert (before["skipped"], before["dead"]) == ({0: "bad record"}, {1: "refused"})
    assert (before["rows"], before["done"], before["failed"]) == ([], [(0, 1)], "")
    for _ in range(3):
        kept.restart()
        assert run.state() == before


def test_a_refusal_in_a_run_without_teachers_comes_back(kept: Kept) -> None:
    run = KeptRun(kept, teachers=0)
    trainer = run.trainer()
    run.put(run.lease())
    claim = trainer.call("claim_batch", partition="r", rewinds=run.rewinds, ids=[0, 1])
    trainer.call("nack", partition="r", lease=claim["lease"], ids=[0], reason="the loss is not finite")
    before = run.state()
    assert before["dead"] == {0: "the loss is not finite"}
    for _ in range(2):
        kept.restart()
        assert run.state() == before


def test_what_is_done_does_not_pile_up(kept: Kept) -> None:
    peer = kept.worker()
    peer.call("open", partition="p", tasks=[{"name": "a", "requires": ["x"]}])
    sizes = []
    for i in range(300):
        peer.call("put", partition="p", ids=[i], columns={"x": ints([i] * 50)})
        peer.call("claim", partition="p", task="a", count=1)
        peer.call("ack", partition="p", task="a", ids=[i])
        path = journal_file(kept.directory)
        assert {file.name.partition("-")[0] for file in kept.directory.iterdir()} == {path.name}
        sizes.append(path.stat().st_size + log_of(path).stat().st_size)
    assert max(sizes) < 2 * SLACK


def journal_file(directory: Path) -> Path:
    (found,) = directory.glob("*.journal")
    return found


def bodies(directory: Path) -> tuple[bytes, bytes]:
    """The bytes of a journal: of its database, and of the database's log."""
    path = journal_file(directory)
    return path.read_bytes(), log_of(path).read_bytes() if log_of(path).exists() else b""


def filled(directory: Path) -> tuple[bytes, bytes]:
    """The bytes of a journal with five puts, as a killed queue leaves it."""
    kept = Kept(directory, slack=1 << 30)
    peer = kept.worker()
    peer.call("open", partition="p", tasks=TASKS)
    for i in range(5):
        peer.call("put", partition="p", ids=[i], columns={"x": ints([i] * 10)})
    found = bodies(directory)
    kept.journal.close()
    return found


def samples_after(directory: Path, database: bytes, log: bytes = b"") -> list[int]:
    """The samples that a queue finds in a journal of these bytes."""
    for old in directory.glob("*.journal*"):
        old.unlink()
    path = directory / "00000007.journal"
    path.write_bytes(database)
    log_of(path).write_bytes(log)
    kept = Kept(directory)
    part = kept.queue.engine.partitions.get("p")
    kept.journal.close()
    return sorted(part.samples.samples) if part else []


def test_a_torn_tail_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "j"
    database, log = filled(directory)
    whole = samples_after(directory, database, log)
    assert whole == [0, 1, 2, 3, 4]
    assert "torn" not in caplog.text
    rng = random.Random(3)
    for end in [len(log) - 1, *sorted(rng.sample(range(1, len(log)), 25))]:
        caplog.clear()
        found = samples_after(directory, database, log[:end])
        assert found == whole[: len(found)]
        assert len(found) < len(whole)
        assert "is torn and ignored" in caplog.text
        padded = samples_after(directory, database, log[:end] + bytes(40))
        assert padded == whole[: len(padded)]
        assert 0 <= len(padded) - len(found) <= 1


def test_large_records_and_a_torn_one(tmp_path: Path) -> None:
    directory = tmp_path / "j"
    kept = Kept(directory, slack=1 << 30)
    peer = kept.worker()
    peer.call("open", partition="p", tasks=TASKS)
    rows = [[i] * (CHUNK_BYTES // 8 * 2 + i) for i in range(3)]
    for i in range(3):
        peer.call("put", partition="p", ids=[i], columns={"x": ints(rows[i])})
    peer = kept.restart()
    assert peer.call("get", partition="p", ids=[2, 0], fields=["x"])["columns"] == {"x": ints(rows[2], rows[0])}
    peer.call("put", partition="p", ids=[3], columns={"x": ints(rows[0])})
    database, log = bodies(directory)
    kept.journal.close()
    assert samples_after(directory, database, log) == [0, 1, 2, 3]
    for end in (len(log) - 1, len(log) - 4096, len(log) - 4097, len(log) - CHUNK_BYTES):
        assert samples_after(directory, database, log[:end]) == [0, 1, 2]


def test_a_full_disk_stops_the_queue_and_leaves_nothing_half_written(kept: Kept) -> None:
    peer = kept.worker()
    peer.call("open", partition="p", tasks=TASKS)
    peer.call("put", partition="p", ids=[0], columns={"x": ints([0])})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log_of(journal_file(kept.directory)).stat().st_size, limits[1]))
    try:
        for ids in ([1], [2]):
            with pytest.raises(XtokenError, match=r"cannot write the journal in .*: disk"):
                peer.call("put", partition="p", ids=ids, columns={"x": ints([1] * CHUNK_BYTES)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    peer = kept.restart()
    assert state(peer, "p", "a") == {"ready": [0]}


def test_one_queue_per_journal(kept: Kept) -> None:
    with pytest.raises(InputError, match="in use"):
        WriteAheadLog(kept.directory, MemoryQueue().engine)
    with pytest.raises(ConfigError, match="sometimes"):
        WriteAheadLog(kept.directory, MemoryQueue().engine, fsync="sometimes")
