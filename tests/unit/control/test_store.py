"""The database: schema version, persistence, unique columns, removal of a run."""

import os
import re
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from xtoken_services.common.run.status import RunState
from xtoken_services.control import store as store_module
from xtoken_services.control.store import (
    FILE,
    VERSION,
    AttemptRow,
    Base,
    GroupRow,
    RunRow,
    Store,
    StoreError,
    TakenError,
    now,
)  # fmt: skip


def row(name: str, **columns: object) -> RunRow:
    known = {"name": "run", "output": f"/runs/{name}", "created": now(), "spec": {}, "state": RunState.RUNNING}
    return RunRow(id=name, **{**known, **columns})


def test_new_database_carries_the_version(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert set(Base.metadata.tables) <= tables


def test_rows_survive_a_restart(tmp_path: Path) -> None:
    first = Store(tmp_path)
    first.add(row("one"))
    first.change("one", state=RunState.STOPPED, step=3)
    first.add_note("one", "resumed")
    first.close()
    second = Store(tmp_path)
    found = second.run("one")
    assert found is not None and (found.state, found.step) == ("stopped", 3)
    assert [note.message for note in second.notes("one")] == ["resumed"]
    assert second.unfinished() == [] and second.counts() == {"stopped": 1}
    second.close()


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1], ids=["older", "newer"])
def test_other_database_version_is_refused(tmp_path: Path, version: int) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(StoreError, match=f"has database version {version}, this xtoken supports version {VERSION}"):
        Store(tmp_path)


def test_two_processes_may_create_the_database(tmp_path: Path) -> None:
    barrier = threading.Barrier(4)

    def open_store() -> None:
        barrier.wait()
        Store(tmp_path).close()

    with ThreadPoolExecutor(4) as pool:
        for opened in [pool.submit(open_store) for _ in range(4)]:
            opened.result()


def test_file_that_is_not_a_database(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"garbage" * 1000)
    with pytest.raises(StoreError, match="file is not a database"):
        Store(tmp_path)


def test_unique_output_and_key(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(row("one", key="k"))
    for other in (row("two", output="/runs/one"), row("two", key="k")):
        with pytest.raises(TakenError):
            store.add(other)
    store.add(row("under_score"))
    assert store.run_around(Path("/runs/one/inner")).id == "one"  # type: ignore[union-attr]
    assert store.run_around(Path("/runs")) is not None
    assert store.run_around(Path("/runs/underXscore")) is None and store.run_around(Path("/runs/on")) is None
    store.close()


def test_remove_cascades(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(row("one"))
    attempt = AttemptRow(run_id="one", launch=1, worker="w", kind="queue", incarnation=1, log="l", started=now())
    store.add_attempts([attempt])
    store.set_group(GroupRow(run_id="one", name="g", restarts=1, failures=1, highest_step=0))
    store.add_note("one", "x")
    store.remove("one")
    assert (store.attempts("one"), store.groups("one"), store.notes("one")) == ([], {}, [])
    store.close()


def test_database_is_private(tmp_path: Path) -> None:
    Store(tmp_path).close()
    (tmp_path / FILE).chmod(0o644)
    store = Store(tmp_path)
    store.add(row("one"))
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    store.close()


def damage(file: Path, kind: str) -> None:
    if kind == "garbage":
        with file.open("r+b") as opened:
            opened.seek(4096)
            opened.write(b"garbage!" * (file.stat().st_size // 8 - 512))
    elif kind == "replaced":
        file.rename(file.with_name("old"))
        file.write_bytes(file.with_name("old").read_bytes())
    elif kind == "removed":
        file.unlink()
    else:
        os.truncate(file, {"emptied": 0, "cut": 8192}[kind])


@pytest.mark.parametrize("kind", ["garbage", "emptied", "cut", "replaced", "removed"])
def test_damage_while_the_database_is_served(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "CHECK_S", 0.0)
    monkeypatch.setattr(store_module, "CHECK_FRACTION", 0.0)
    store = Store(tmp_path)
    for number in range(40):
        store.add(row(f"run-{number}", spec={"text": "x" * 5000}))
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.check()
    damage(tmp_path / FILE, kind)
    with pytest.raises(StoreError, match=rf"database {re.escape(str(tmp_path / FILE))}"):
        store.check()
    store.close()


@pytest.mark.parametrize("kind", ["garbage", "emptied"])
def test_damaged_database_is_not_opened(tmp_path: Path, kind: str) -> None:
    store = Store(tmp_path)
    store.add(row("one"))
    store.close()
    damage(tmp_path / FILE, kind)
    with pytest.raises(StoreError, match="is empty: restore it" if kind == "emptied" else "is damaged: .*: restore it"):
        Store(tmp_path)
