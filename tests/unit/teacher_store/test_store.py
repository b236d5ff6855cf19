"""Stores on disk: whole or not there at all, damage named, and only for what they were built from."""

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped] # it has no stubs
import numpy as np
import pytest
from fsspec.asyn import AsyncFileSystem  # type: ignore[import-untyped]

from xtoken_core.teacher_store.codec import Array, pack
from xtoken_core.teacher_store.identity import StoreError, StoreIdentity
from xtoken_core.teacher_store.shards import ALWAYS, FRAMES, INDEX, Skip
from xtoken_core.teacher_store.store import MissingRecordError, TeacherStore, empty_values, is_miss, parts_of
from xtoken_core.teacher_store.writing import (
    ShardWriter,
    drop_damaged,
    drop_records,
    remove_damaged_indices,
    remove_unfinished,
)

BASE: dict[str, Any] = {
    "content": "topk", "text": "a" * 64, "records": 10_000, "append_eos": True, "tokenizer": "b" * 64,
    "context_length": 64, "model": "c" * 64, "dtype": "bfloat16", "vocab_size": 500, "topk": 4,
}  # fmt: skip
IDENTITY = StoreIdentity(**BASE)


def values_of(record: int) -> Array:
    """The values of a record, by its number."""
    tokens = record % 7 + 1
    return np.random.default_rng(record).normal(size=(tokens, IDENTITY.width)).astype(np.float32)


def add(writer: ShardWriter, record: int) -> None:
    """Add a record to a shard."""
    values = values_of(record)
    frame = pack([np.ascontiguousarray(part) for part in parts_of(values, IDENTITY)])
    writer.add(record, len(values), f"digest-{record}", frame)


def write_store(store: str, records: Iterable[int]) -> TeacherStore:
    """A store of some records in one shard, beside those that it has."""
    opened = TeacherStore.create(store, IDENTITY)
    writer = ShardWriter(opened.files, 1 << 20)
    for record in records:
        add(writer, record)
    writer.flush()
    return TeacherStore.open(store)


def read(store: TeacherStore, record: int) -> Array:
    """A record's values as the store has them."""
    out = empty_values(store.identity, store.entries[record].tokens)
    store.read_into(record, out)
    return out


def missing(store: TeacherStore, records: Iterable[int], condition: str = "mine") -> list[int]:
    """The records that a build would compute."""
    return store.missing(records, condition)


@pytest.fixture(params=["directory", "memory"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "directory" else f"memory://{tmp_path.name}"


def test_records_come_back(address: str) -> None:
    store = write_store(address, range(20))
    assert sorted(store.entries) == list(range(20))
    assert all((read(store, record) == values_of(record)).all() for record in range(20))
    assert store.damaged(range(20)) == {}
    assert store.tokens == sum(len(values_of(record)) for record in range(20))


def test_a_second_writer_adds_and_changes_nothing(address: str) -> None:
    first = write_store(address, range(5))
    writer = ShardWriter(first.files, 1 << 20)
    add(writer, 4)
    add(writer, 9)
    writer.skip(7, Skip("train.jsonl:8: empty", ALWAYS))
    assert missing(first, [4, 7, 9]) == [7, 9]
    writer.flush()
    before = first.entries[4]
    first.refresh()
    assert missing(first, [4, 7, 9]) == []
    assert first.skipped == {7: "train.jsonl:8: empty"}
    assert first.entries[4] == before


def test_a_skipped_record_is_missing_under_another_condition(address: str) -> None:
    store = write_store(address, range(2))
    writer = ShardWriter(store.files, 1 << 20)
    add(writer, 9)
    for record, condition in ((2, "mine"), (3, "other"), (4, ALWAYS)):
        writer.skip(record, Skip("refused", condition))
    writer.flush()
    opened = TeacherStore.open(address)
    drop_records(opened.files, opened.entries[9].shard.replace(FRAMES, INDEX), {9})
    for each in (opened, TeacherStore.open(address)):
        assert missing(each, range(6)) == [3, 5]
        assert missing(each, range(6), "other") == [2, 5]
    writer.skip(3, Skip("refused", "mine"))
    writer.flush()
    opened.refresh()
    assert [missing(opened, range(6), condition) for condition in ("mine", "other")] == [[5], [2, 5]]


def test_what_the_store_lacks_is_told_from_what_a_template_refuses(tmp_path: Path) -> None:
    store = write_store(str(tmp_path), range(2))
    (tmp_path / store.entries[1].shard).unlink()
    for record in (1, 3):
        error = store.frames([record])[record]
        assert is_miss(f"train.jsonl:{record + 1}: {error}")
    assert not is_miss("train.jsonl:4: the student's chat template refuses the messages")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"text": "d" * 64}, "the text"), ({"tokenizer": "d" * 64}, "the teacher's tokenizer"),
        ({"model": "d" * 64}, "the teacher's weights"), ({"topk": 8}, r"teacher.topk \(4 in the store, 8 in the run\)"),
        ({"temperature": 2.0}, "loss.temperature"), ({"context_length": 32}, "context_length"),
        ({"content": "hidden", "topk": 0, "hidden_size": 8}, "teacher.content"),
    ],
)  # fmt: skip
def test_a_store_of_something_else_is_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    write_store(str(tmp_path / "store"), range(2))
    with pytest.raises(StoreError, match=named):
        TeacherStore.create(str(tmp_path / "store"), StoreIdentity(**{**BASE, **change}))


def test_no_store_and_a_damaged_manifest_are_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store at"):
        TeacherStore.open(str(tmp_path))
    (tmp_path / "store.json").write_text('{"format": 2}')
    with pytest.raises(StoreError, match=r"store\.json is damaged, or of another version"):
        TeacherStore.open(str(tmp_path))


def test_a_missing_record_is_named(tmp_path: Path) -> None:
    store = write_store(str(tmp_path), range(3))
    with pytest.raises(MissingRecordError, match="record 3 of the text is not in the store"):
        store.frame(3)
    store.check_tokens(2, "digest-2", 3)
    for digest, count in (("digest-1", 3), ("digest-2", 4)):
        with pytest.raises(MissingRecordError, match="record 2 of the text has other tokens"):
            store.check_tokens(2, digest, count)


def test_flipped_bytes_are_detected_and_named(tmp_path: Path) -> None:
    store = write_store(str(tmp_path), range(3))
    (frames,), (index,) = tmp_path.glob("*.frames"), tmp_path.glob("shard-*.json")
    whole = frames.read_bytes()
    for at in range(0, len(whole), 7):
        frames.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        record = max(number for number, entry in store.entries.items() if entry.offset <= at)
        errors = TeacherStore.open(str(tmp_path)).damaged(range(3))
        assert list(errors) == [record]
        assert errors[record].startswith(f"record {record} of the text is damaged in the store")
        assert frames.name in errors[record]
    frames.write_bytes(whole[:-1])
    assert list(TeacherStore.open(str(tmp_path)).damaged(range(3))) == [2]
    frames.write_bytes(whole)
    whole = index.read_bytes()
    for at in range(0, len(whole), 5):
        index.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(StoreError, match=r"the index .* is damaged"):
            TeacherStore.open(str(tmp_path))


def write_without_end(store: str) -> None:
    """Write shard after shard, from the first record that is missing."""
    opened = TeacherStore.create(store, IDENTITY)
    writer = ShardWriter(opened.files, 2000)
    for record in itertools.count(len(opened.entries)):
        add(writer, record)
        if writer.is_full:
            writer.flush()


@pytest.mark.parametrize("damage", ["removed", "emptied"])
def test_records_of_a_shard_that_is_gone_are_missing_and_dropped(address: str, damage: str) -> None:
    store = write_store(address, range(5))
    write_store(address, [7])
    shard = store.entries[0].shard
    if damage == "removed":
        store.files.remove(shard)
    else:
        store.files.write(shard, b"")
    opened = TeacherStore.open(address)
    assert list(opened.damaged([0, 4, 7])) == [0, 4]
    with pytest.raises(MissingRecordError, match=rf"record 4 of the text is damaged in the store: .*{shard}"):
        opened.frame(4)
    frames = opened.frames([7, 3, 9])
    assert {record for record, frame in frames.items() if isinstance(frame, MissingRecordError)} == {3, 9}
    assert bytes(frames[7]) == bytes(opened.frame(7))  # type: ignore[arg-type]
    assert drop_damaged(opened, range(8)) == [0, 1, 2, 3, 4]
    assert missing(TeacherStore.open(address), range(8)) == [0, 1, 2, 3, 4, 5, 6]


def test_a_damaged_index_is_removed_for_a_build(address: str) -> None:
    store = write_store(address, range(5))
    write_store(address, [7])
    names = [name for name in store.files.names() if name.startswith("shard-") and name.endswith(".json")]
    index = next(name for name in names if name[:-5] == store.entries[0].shard.rpartition(".")[0])
    store.files.write(index, store.files.read(index)[:-2])
    with pytest.raises(StoreError, match=rf"the index .*{index} is damaged"):
        TeacherStore.open(address)
    assert remove_damaged_indices(store.files) == [index]
    assert missing(TeacherStore.open(address), [0, 4, 7]) == [0, 4]
    assert remove_unfinished(store.files) == [store.entries[0].shard]


class Slow(AsyncFileSystem):
    """A file system that takes a while for each request, as those of a network do."""

    protocol = "slow"
    seconds = 0.05
    fails = ""

    async def _cat_file(self, path: str, start: int = 0, end: int | None = None, **_: Any) -> bytes:
        await asyncio.sleep(self.seconds)
        if self.fails and self.fails in path:
            raise ConnectionError("the line is down")
        return Path(path).read_bytes()[start:end]

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[dict[str, Any]]:
        return [{"name": str(file), "type": "file", "size": file.stat().st_size} for file in Path(path).iterdir()]

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "type": "file", "size": Path(path).stat().st_size}


def test_records_of_a_remote_store_are_requested_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("slow", Slow, clobber=True)
    write_store(str(tmp_path), range(30))
    store = TeacherStore.open(f"slow://{tmp_path}")
    began = time.monotonic()
    frames = store.frames(range(30))
    assert time.monotonic() - began < 30 * Slow.seconds / 2
    for record, frame in frames.items():
        out = empty_values(IDENTITY, store.entries[record].tokens)
        assert not isinstance(frame, StoreError)
        store.unpack_into(record, frame, out)
        np.testing.assert_array_equal(out, values_of(record))
    monkeypatch.setattr(Slow, "fails", ".frames")
    found = store.frames([3])[3]
    assert isinstance(found, StoreError)
    assert not isinstance(found, MissingRecordError)
    assert "the line is down" in str(found)


def test_damaged_records_are_dropped_for_a_build(tmp_path: Path) -> None:
    store = write_store(str(tmp_path), range(20))
    for record in (3, 11):
        entry = store.entries[record]
        content = bytearray((tmp_path / entry.shard).read_bytes())
        content[entry.offset] ^= 1
        (tmp_path / entry.shard).write_bytes(content)
    damaged = TeacherStore.open(str(tmp_path))
    assert drop_damaged(damaged, [*range(12), 50]) == [3, 11]
    for opened in (damaged, TeacherStore.open(str(tmp_path))):
        assert missing(opened, range(20)) == [3, 11]
        np.testing.assert_array_equal(read(opened, 19), values_of(19))
    np.testing.assert_array_equal(read(write_store(str(tmp_path), [3]), 3), values_of(3))


def test_a_writer_killed_at_any_moment_leaves_only_whole_records(tmp_path: Path) -> None:
    rng, count, kills = random.Random(3), 0, 0
    TeacherStore.create(str(tmp_path), IDENTITY)
    while kills < 12 or not count:
        pid = os.fork()  # a new interpreter would take a second to import numpy
        if not pid:
            try:
                write_without_end(str(tmp_path))
            finally:
                os._exit(1)
        time.sleep(rng.uniform(0.0, 0.2))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        kills += 1
        store = TeacherStore.open(str(tmp_path))
        assert sorted(store.entries) == list(range(len(store.entries)))
        assert len(store.entries) >= count
        assert store.damaged(range(count, len(store.entries))) == {}
        count = len(store.entries)
        remove_unfinished(store.files)
        stems = [{path.stem for path in tmp_path.glob(pattern)} for pattern in ("*.frames", "shard-*.json")]
        assert stems[0] == stems[1]
        assert not list(tmp_path.glob(".shard*"))
    assert all((read(store, record) == values_of(record)).all() for record in store.entries)
