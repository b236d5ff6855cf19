"""Journals that are damaged, of another version, or written by something else than a queue."""

import os
import random
import sqlite3
import tracemalloc
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_journal import Kept, bodies, filled, journal_file, samples_after
from tests.support.cases import cases
from xtoken_core.errors import InputError
from xtoken_core.wire import ColumnHead
from xtoken_core.wire import messages as m
from xtoken_services.queue import log_records as r
from xtoken_services.queue.journal_file import FRAME_HEADER, PAGE_BYTES, JournalFile, remove

WHOLE = [0, 1, 2, 3, 4]
FRAME = FRAME_HEADER + PAGE_BYTES


def refusal(directory: Path) -> str:
    """The one line by which a queue refuses a journal, which stays as it is."""
    found = bodies(directory)
    with pytest.raises(InputError, match=r"cannot read the journal .*\.journal: .*: restore it, or move it") as caught:
        Kept(directory)
    assert "\n" not in str(caught.value)
    assert bodies(directory) == found
    return str(caught.value)


def changed(directory: Path, *statements: str) -> bytes:
    """Change a journal by another program, which copies the log back; return its bytes."""
    with closing(sqlite3.connect(journal_file(directory))) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return journal_file(directory).read_bytes()


@pytest.mark.parametrize("version", [0, 2], ids=["older", "newer"])
def test_a_journal_of_another_version_is_refused(tmp_path: Path, version: int) -> None:
    filled(tmp_path / "j")
    changed(tmp_path / "j", f"PRAGMA user_version={version}")
    assert f"has format version {version}, and this queue reads version 1" in refusal(tmp_path / "j")


def test_a_segment_of_the_first_journals_is_refused(tmp_path: Path) -> None:
    Kept(tmp_path / "j").journal.close()
    journal_file(tmp_path / "j").write_bytes(b"XTQJRNL3" + bytes(100))
    assert "file is not a database" in refusal(tmp_path / "j")


@pytest.mark.parametrize("where", ["start", "middle"])
@pytest.mark.parametrize("file", ["database", "log"])
def test_a_damaged_journal_is_named(tmp_path: Path, file: str, where: str) -> None:
    directory = tmp_path / "j"
    database, log = map(bytearray, filled(directory))
    if file == "database":
        database, log = bytearray(changed(directory)), bytearray()
    body = log or database
    body[2 if where == "start" else len(body) // 2] ^= 0x40
    with pytest.raises(InputError, match=r"cannot read the journal .*00000007\.journal: "):
        samples_after(directory, bytes(database), bytes(log))
    refusal(directory)


def test_no_flip_in_the_last_batch_is_dropped(tmp_path: Path) -> None:
    directory = tmp_path / "j"
    database, log = filled(directory)
    assert samples_after(directory, database, log) == WHOLE
    last = len(log) - FRAME
    for at in (*range(last, last + FRAME_HEADER), *range(last + FRAME_HEADER, len(log), 16), len(log) - 1):
        damaged = bytearray(log)
        damaged[at] ^= 0x10
        with pytest.raises(InputError, match=r"what follows batch 5 of [56] is damaged"):
            samples_after(directory, database, bytes(damaged))


def test_no_flip_in_the_database_loses_a_sample(tmp_path: Path) -> None:
    directory = tmp_path / "j"
    filled(directory)
    whole = changed(directory)
    rng, refused = random.Random(4), 0
    for at in [*rng.sample(range(len(whole)), 150), *range(len(whole) - 50, len(whole))]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.randrange(8)
        try:
            assert samples_after(directory, bytes(damaged)) == WHOLE
        except InputError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 50


@cases(
    "statements",
    ["DELETE FROM rows WHERE number = 4"],
    ["DELETE FROM rows WHERE number = 4", "UPDATE rows SET number = number - 1 WHERE number > 4"],
    [
        "UPDATE rows SET number = -number WHERE number > 4",
        "UPDATE rows SET number = 1 - number WHERE number < 0",
        "INSERT INTO rows SELECT 5, batch, record, part, checksum, body FROM rows WHERE number = 4",
    ],
    [
        "UPDATE rows SET number = 100 WHERE number = 4",
        "UPDATE rows SET number = 4 WHERE number = 6",
        "UPDATE rows SET number = 6 WHERE number = 100",
    ],
    ids=["removed", "removed and counted anew", "doubled", "swapped"],
)
def test_rows_keep_their_order(tmp_path: Path, statements: Sequence[str]) -> None:
    directory = tmp_path / "j"
    filled(directory)
    whole = changed(directory)
    assert samples_after(directory, whole) == WHOLE
    remove(journal_file(directory))
    (directory / "00000007.journal").write_bytes(whole)
    changed(directory, *statements)
    assert "row 4 is damaged" in refusal(directory) or "row 5 is damaged" in refusal(directory)


def test_a_statement_that_was_put_in_is_not_run(tmp_path: Path) -> None:
    filled(tmp_path / "j")
    changed(
        tmp_path / "j",
        "ALTER TABLE rows RENAME TO others",
        "CREATE VIEW rows AS SELECT number, batch, record, part, checksum, body FROM others",
    )
    assert "it has other tables than a journal" in refusal(tmp_path / "j")


def written(directory: Path, *records: Any, buffers: Sequence[bytes] = ()) -> None:
    """Make a journal of these records after the one that opens partition p; the last one has the buffers."""
    task = m.TaskDef(name="a", requires=["x"])
    opened = m.OpenPartition(id="a", session="s", partition="p", tasks=[task])
    entries = [(r.Opened(partition="p", definition=opened), ()), *((record, ()) for record in records[:-1])]
    directory.mkdir(mode=0o700)
    path = directory / "00000007.journal"
    JournalFile(path, [*entries, (records[-1], buffers)], "NORMAL").close()


def test_a_bad_row_is_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = r.Rows(partition="p", ids=[1], columns=[ColumnHead("x", "dense", "int64", 1)])
    head = ColumnHead("x", "jagged", "int64", 1, [0])
    bad = r.Rows(partition="p", ids=[7], columns=[head])
    offsets = (0).to_bytes(8, "little") + ((1 << 63) - 1).to_bytes(8, "little")
    written(tmp_path / "good", good, buffers=(bytes(8),))
    assert list(Kept(tmp_path / "good").queue.engine.partitions["p"].samples.samples) == [1]
    written(tmp_path / "bad", bad, buffers=(offsets, b""))
    assert list(Kept(tmp_path / "bad").queue.engine.partitions["p"].samples.samples) == []
    assert "record 2 is left out: samples [7] of partition 'p': column 'x'" in caplog.text


OBJECT = ColumnHead("x", "object", "", 1)


def test_object_rows_are_checked_without_objects(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The row of a million lists would take a hundred times its bytes; extension types come back to nobody."""
    size = 1_000_000
    row = b"\xdd" + (size - 5).to_bytes(4, "big") + b"\x90" * (size - 5)
    rows = {1: row, 7: b"\xd4\x01\x00"}
    for number, body in rows.items():
        offsets = (0).to_bytes(8, "little") + len(body).to_bytes(8, "little")
        record = r.Rows(partition="p", ids=[number], columns=[OBJECT])
        written(tmp_path / str(number), record, buffers=(offsets, body))
        tracemalloc.start()
        kept = Kept(tmp_path / str(number)).queue.engine.partitions["p"]
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert list(kept.samples.samples) == [number] * (number == 1)
        assert most < 16 * size
    assert "samples [7] of partition 'p': an object row has the byte 0xd4, an extension type" in caplog.text


MISFITS = {
    "unknown partition": (r.Sealed(partition="q"), "there is no partition 'q'"),
    "unknown task": (r.Done(partition="p", task="b", ids=[1]), "'b'"),
    "no record": ({"type": "other", "partition": "p"}, "Invalid value 'other'"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_misfit_record_is_one_line(tmp_path: Path, name: str) -> None:
    record, words = MISFITS[name]
    written(tmp_path / "j", record)
    assert f"record 2 does not fit those before it: {words}" in refusal(tmp_path / "j")


@cases(
    "record, words",
    (r.BlockRows(partition="r", ids=[], dead={1: "bad", 2: "bad"}, partial=True), "position 2 is not in block 0"),
    (r.AtStep(partition="r", step=2, acked=True), "step 2 is not the one after step 0"),
    ids=["foreign position", "step left out"],
)
def test_a_record_that_does_not_fit_its_run_is_refused(tmp_path: Path, record: r.Record, words: str) -> None:
    sizes = {"positions": 8, "samples_per_step": 2, "block_size": 2, "span": 6, "teachers": 1, "ranks": 1, "slots": 2}
    run = m.OpenPartition(id="a", session="s", partition="r", tasks=[], run=m.RunDef(**sizes, document=b""))
    written(tmp_path / "j", r.Opened(partition="r", definition=run), r.AtStep(partition="r", step=0), record)
    assert f"record 4 does not fit those before it: {words}" in refusal(tmp_path / "j")


def test_a_log_whose_journal_was_moved_away_is_not_read(tmp_path: Path) -> None:
    directory = tmp_path / "j"
    filled(directory)
    journal_file(directory).unlink()
    kept = Kept(directory)
    assert not kept.queue.engine.partitions
    kept.worker().call("open", partition="q", tasks=[])
    kept.restart()
    assert list(kept.queue.engine.partitions) == ["q"]


@pytest.mark.parametrize("suffix", ["", "-wal"], ids=["database", "log"])
def test_a_journal_that_is_no_file_is_refused(tmp_path: Path, suffix: str) -> None:
    Kept(tmp_path / "j").journal.close()
    path = Path(f"{journal_file(tmp_path / 'j')}{suffix}")
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(InputError, match="not a regular file"):
        Kept(tmp_path / "j")
    path.unlink()
    (tmp_path / "real").write_bytes(b"")
    path.symlink_to(tmp_path / "real")
    with pytest.raises(InputError, match="not a regular file"):
        Kept(tmp_path / "j")


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(InputError, match="may be written by others: chmod 700"):
        Kept(directory)
    directory.chmod(0o700)
    Kept(directory).journal.close()
