"""The database: its migrations lead to the tables, it outlives its reader, a removed run leaves nothing in it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from services.control import store as store_module
from services.control.store import (
    FILE,
    HEAD,
    AttemptRow,
    Base,
    GroupRow,
    RunRow,
    Store,
    StoreError,
    TakenError,
    now,
)  # fmt: skip
from services.supervisor.run_record import RunState

MIGRATIONS = Path(store_module.__file__).with_name("migrations")


def row(name: str, **columns: object) -> RunRow:
    known = {"name": "run", "output": f"/runs/{name}", "created": now(), "spec": {}, "state": RunState.RUNNING}
    return RunRow(id=name, **{**known, **columns})


def test_the_steps_lead_to_the_tables_as_they_are_declared(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store._engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    store.close()
    assert ScriptDirectory(str(MIGRATIONS)).get_current_head() == HEAD


def test_what_is_written_is_there_for_the_next(tmp_path: Path) -> None:
    first = Store(tmp_path)
    first.add(row("one"))
    first.change("one", state=RunState.STOPPED, step=3)
    first.note("one", "resumed")
    first.close()
    second = Store(tmp_path)
    found = second.run("one")
    assert found is not None and (found.state, found.step) == ("stopped", 3)
    assert [note.message for note in second.notes("one")] == ["resumed"]
    assert second.unfinished() == [] and second.counts() == {"stopped": 1}
    second.close()


def test_a_database_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StoreError, match="was written by a later version of xtoken"):
        Store(tmp_path)


def test_a_file_that_is_no_database_is_one_line(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"garbage" * 1000)
    with pytest.raises(StoreError, match="file is not a database"):
        Store(tmp_path)


@pytest.mark.parametrize("directory", [True, False], ids=["file", "memory"])
def test_outputs_and_keys_are_unique(tmp_path: Path, directory: bool) -> None:
    store = Store(tmp_path if directory else None)
    store.add(row("one", key="k"))
    for other in (row("two", output="/runs/one"), row("two", key="k")):
        with pytest.raises(TakenError):
            store.add(other)
    store.add(row("under_score"))
    assert store.run_around(Path("/runs/one/inner")).id == "one"  # type: ignore[union-attr]
    assert store.run_around(Path("/runs")) is not None
    assert store.run_around(Path("/runs/underXscore")) is None and store.run_around(Path("/runs/on")) is None
    store.close()


def test_a_removed_run_takes_everything_with_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(row("one"))
    attempt = AttemptRow(run_id="one", life=1, worker="w", kind="queue", incarnation=1, log="l", started=now())
    store.intend([attempt])
    store.set_group(GroupRow(run_id="one", name="g", restarts=1, failures=1, highest_step=0))
    store.note("one", "x")
    store.remove("one")
    assert (store.attempts("one"), store.groups("one"), store.notes("one")) == ([], {}, [])
    store.close()
