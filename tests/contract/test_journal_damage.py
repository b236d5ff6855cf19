"""Segments that are damaged, of another version, or written by something else than a queue."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.contract.test_journal import Kept, filled, samples_after
from xtoken_core.errors import InputError
from xtoken_core.wire import ColumnHead
from xtoken_core.wire import messages as m
from xtoken_services.queue import log_records as r
from xtoken_services.queue.segment import CHECK, HEADER, PREFIX, Writer


@pytest.mark.parametrize("version", [b"2", b"4"], ids=["older", "newer"])
def test_a_segment_of_another_version_is_refused(tmp_path: Path, version: bytes) -> None:
    kept = Kept(tmp_path)
    kept.journal.close()
    (segment,) = tmp_path.glob("*.journal")
    body = segment.read_bytes()
    segment.write_bytes(body[:7] + version + body[8:])
    with pytest.raises(InputError) as caught:
        kept.start()
    assert f"has format version {version.decode()}, and this queue reads version 3" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", ["start", "middle"])
def test_a_damaged_segment_is_named(tmp_path: Path, where: str) -> None:
    directory = tmp_path / "j"
    body = bytearray(filled(directory))
    body[2 if where == "start" else len(body) // 2] ^= 0x40
    with pytest.raises(InputError, match=r"00000007\.journal is damaged"):
        samples_after(directory, bytes(body))


def records_of(body: bytes) -> list[bytes]:
    """The records of a segment, each with its framing."""
    found, at = [], len(HEADER)
    while at < len(body):
        end = at + PREFIX.size + 2 * CHECK.size + PREFIX.unpack_from(body, at)[1]
        found.append(body[at:end])
        at = end
    return found


def test_no_flip_in_the_last_record_is_dropped(tmp_path: Path) -> None:
    body = filled(tmp_path / "j")
    last = len(records_of(body)[-1])
    for at in range(len(body) - last, len(body)):
        damaged = bytearray(body)
        damaged[at] ^= 0x10
        with pytest.raises(InputError, match="is damaged at byte"):
            samples_after(tmp_path / "j", bytes(damaged))


@pytest.mark.parametrize("change", ["removed", "doubled", "swapped"])
def test_records_are_chained(tmp_path: Path, change: str) -> None:
    body = filled(tmp_path / "j")
    found = records_of(body)
    changed = {
        "removed": found[:2] + found[3:],
        "doubled": found[:3] + found[2:],
        "swapped": [*found[:2], found[3], found[2], *found[4:]],
    }[change]
    assert samples_after(tmp_path / "j", HEADER + b"".join(found)) == [0, 1, 2, 3, 4]
    with pytest.raises(InputError, match=r"is damaged at byte \d+, record [34]:") as caught:
        samples_after(tmp_path / "j", HEADER + b"".join(changed))
    assert "\n" not in str(caught.value)


def written(directory: Path, *records: r.Record, buffers: tuple[bytes, ...] = ()) -> bytes:
    """A segment with these records after the one that opens partition p; the last one has the buffers."""
    task = m.TaskDef(name="a", requires=["x"])
    opened = m.OpenPartition(id="a", session="s", partition="p", tasks=[task])
    (directory / "j").mkdir(mode=0o700, exist_ok=True)
    path = directory / "made"
    with ThreadPoolExecutor(1) as threads, path.open("wb") as file:
        writer = Writer(file.fileno(), threads)
        writer.append(r.Opened(partition="p", definition=opened), ())
        for record in records:
            writer.append(record, buffers if record is records[-1] else ())
    return path.read_bytes()


def test_a_bad_row_is_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = r.Rows(partition="p", ids=[1], columns=[ColumnHead("x", "dense", "int64", 1)], sizes=[8])
    head = ColumnHead("x", "jagged", "int64", 1, [0])
    bad = r.Rows(partition="p", ids=[7], columns=[head], sizes=[16, 0])
    offsets = (0).to_bytes(8, "little") + ((1 << 63) - 1).to_bytes(8, "little")
    good_body = written(tmp_path, good, buffers=(bytes(8),))
    assert samples_after(tmp_path / "j", good_body) == [1]
    bad_body = written(tmp_path, bad, buffers=(offsets, b""))
    assert samples_after(tmp_path / "j", bad_body) == []
    assert "record 2 is left out: samples [7] of partition 'p': column 'x'" in caplog.text


MISFITS = {
    "unknown partition": (r.Sealed(partition="q"), "record 2 contradicts those before it: there is no partition 'q'"),
    "unknown task": (r.Done(partition="p", task="b", ids=[1]), "record 2 contradicts those before it: 'b'"),
    "other sizes": (r.Rows(partition="p", ids=[], sizes=[8]), "record 2 is none of format version 3: 0 bytes"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_misfit_record_is_one_line(tmp_path: Path, name: str) -> None:
    record, words = MISFITS[name]
    body = written(tmp_path, record)
    with pytest.raises(InputError) as caught:
        samples_after(tmp_path / "j", body)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_block_after_the_record_that_failed_its_run_is_read(tmp_path: Path) -> None:
    """Snapshots of older queues are in the order of the blocks."""
    sizes = {"positions": 8, "samples_per_step": 2, "block_size": 2, "span": 6, "teachers": 1, "ranks": 1, "slots": 2}
    run = m.OpenPartition(id="a", session="s", partition="r", tasks=[], run=m.RunDef(**sizes, document=b""))
    records = [
        r.Opened(partition="r", definition=run),
        r.AtStep(partition="r", step=0),
        r.BlockRefused(partition="r", block=0, reason="unreadable", times=3),
        r.BlockRows(partition="r", ids=[], tombstones={2: "empty", 3: "empty"}),
        r.GivenUp(partition="r", reason="2 dead letters"),
    ]
    body = written(tmp_path, *records)
    (tmp_path / "j" / "00000007.journal").write_bytes(body)
    kept = Kept(tmp_path / "j")
    kept.journal.close()
    part = kept.queue.engine.partitions["r"]
    assert (part.run.skipped, sorted(part.samples.dead)) == ({2: "empty", 3: "empty"}, [0, 1])
    assert part.run.failed.startswith("2 dead letters")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (r.BlockRows(partition="r", ids=[], dead={1: "bad", 2: "bad"}, partial=True), "position 2 is not in block 0"),
        (r.AtStep(partition="r", step=2, acked=True), "step 2 is not the one after step 0"),
    ],
    ids=["foreign position", "step left out"],
)
def test_a_record_that_does_not_fit_its_run_is_refused(tmp_path: Path, record: r.Record, words: str) -> None:
    sizes = {"positions": 8, "samples_per_step": 2, "block_size": 2, "span": 6, "teachers": 1, "ranks": 1, "slots": 2}
    run = m.OpenPartition(id="a", session="s", partition="r", tasks=[], run=m.RunDef(**sizes, document=b""))
    body = written(tmp_path, r.Opened(partition="r", definition=run), r.AtStep(partition="r", step=0), record)
    (tmp_path / "j" / "00000007.journal").write_bytes(body)
    with pytest.raises(InputError, match=f"record 4 contradicts those before it: {words}"):
        Kept(tmp_path / "j")


def test_a_segment_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "00000007.journal")
    with pytest.raises(InputError, match="not a regular file"):
        Kept(tmp_path)
    (tmp_path / "00000007.journal").unlink()
    (tmp_path / "real").write_bytes(b"")
    (tmp_path / "00000007.journal").symlink_to(tmp_path / "real")
    with pytest.raises(InputError, match="cannot read the journal segment"):
        Kept(tmp_path)


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(InputError, match="may be written by others: chmod 700"):
        Kept(directory)
    directory.chmod(0o700)
    Kept(directory).journal.close()
