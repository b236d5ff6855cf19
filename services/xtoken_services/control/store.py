"""The control plane's SQLite database, in the runs' directory.

The file is private to its user, created whole, and checked while it is served. It is
never opened here except by SQLite: closing a descriptor of it would drop this process's locks.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, delete, event, func, inspect, or_, select, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session

from xtoken_core.errors import XtokenError, os_errors_as
from xtoken_services.common.run.status import RunState, RunSummary
from xtoken_services.control.tables import AttemptRow, Base, GroupRow, NoteRow, RunRow

FILE = ".control.sqlite3"
VERSION = 2
"""The number of the schema in `tables`, written to `PRAGMA user_version`; raise it with every change of a table."""
BUSY_S = 10.0
SUMMARY = ("seq", *RunSummary.model_fields)
REMEDY = "restore it from a backup, or move it away to start without the runs in it"
SIDE_FILES = ("-wal", "-shm", "-journal")
CHECK_S = 5.0
CHECK_FRACTION = 100.0
"""A check of the content is repeated after this many times its own duration, at the earliest after `CHECK_S`."""


class TakenError(XtokenError):
    """Another run has the same output directory or idempotency key."""

    status = 409


def now() -> str:
    """Return the current UTC time as an ISO 8601 string with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Store:
    """Access to the tables of runs, attempts, groups and notes.

    Thread-safe. Returned rows are detached: changing them does not change the database.

    Args:
        directory: Directory of the database file.

    Raises:
        StoreError: The database cannot be opened, is damaged, or has another schema version.
    """

    def __init__(self, directory: Path) -> None:
        create_private(directory / FILE, _create)
        self._file = DatabaseFile(directory / FILE)
        self._engine = create_engine(f"sqlite:///{directory / FILE}", connect_args={"timeout": BUSY_S})
        event.listen(self._engine, "connect", _configure)
        with self._errors():
            _create_or_check(self._engine)

    def check(self) -> None:
        """Check the file of the database.

        Raises:
            StoreError: It is gone, empty or damaged.
        """
        self._file.check()

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    # Runs

    def add(self, row: RunRow) -> RunRow:
        """Insert a run.

        Raises:
            TakenError: Another run has the same output or key.
        """
        try:
            with self._session() as session:
                session.add(row)
        except IntegrityError as error:
            raise TakenError(f"output: {row.output} belongs to another run") from error
        return row

    def run(self, run_id: str) -> RunRow | None:
        """Return the run with this id."""
        return self._one(RunRow.id == run_id)

    def run_with_key(self, key: str) -> RunRow | None:
        """Return the run with this idempotency key."""
        return self._one(RunRow.key == key)

    def run_with_output(self, output: Path) -> RunRow | None:
        """Return the run that writes to this directory."""
        return self._one(RunRow.output == str(output))

    def run_around(self, output: Path) -> RunRow | None:
        """Return a run whose output is this directory, one below it, or one above it."""
        below = str(output).replace("\\", "\\\\").replace("%", r"\%").replace("_", r"\_") + "/%"
        above = [str(parent) for parent in (output, *output.parents)]
        return self._one(or_(RunRow.output.in_(above), RunRow.output.like(below, escape="\\")))

    def unfinished(self) -> list[RunRow]:
        """Return the runs that are not over, oldest first."""
        finished = [state for state in RunState if state.over]
        with self._reading() as session:
            return list(session.scalars(select(RunRow).where(RunRow.state.not_in(finished)).order_by(RunRow.seq)))

    def page(
        self, limit: int, *, before: int | None = None, states: Sequence[RunState] = (), name: str = ""
    ) -> list[dict[str, Any]]:
        """List one page of run summaries, newest first.

        Args:
            limit: Largest number of runs.
            before: Select runs with a smaller `seq`.
            states: Select runs in these states; all if empty.
            name: Select runs with this name; all if empty.
        """
        query = select(*(getattr(RunRow, name) for name in SUMMARY)).order_by(RunRow.seq.desc()).limit(limit)
        if before is not None:
            query = query.where(RunRow.seq < before)
        if states:
            query = query.where(RunRow.state.in_(states))
        if name:
            query = query.where(RunRow.name == name)
        with self._errors(), self._engine.connect() as connection:
            return [dict(zip(SUMMARY, row, strict=True)) for row in connection.execute(query)]

    def specs(self, run_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the specifications of runs by id."""
        with self._reading() as session:
            return dict(session.execute(select(RunRow.id, RunRow.spec).where(RunRow.id.in_(run_ids))).all())

    def counts(self) -> dict[str, int]:
        """Return the number of runs by state."""
        with self._reading() as session:
            rows = session.execute(select(RunRow.state, func.count()).group_by(RunRow.state))
            return dict(rows.all())

    def change(self, run_id: str, **values: Any) -> None:
        """Update columns of a run."""
        with self._session() as session:
            session.execute(update(RunRow).where(RunRow.id == run_id).values(**values))

    def remove(self, run_id: str) -> None:
        """Delete a run; its attempts, groups and notes are deleted with it."""
        with self._session() as session:
            session.execute(delete(RunRow).where(RunRow.id == run_id))

    # Attempts, groups and notes

    def add_attempts(self, rows: Sequence[AttemptRow]) -> None:
        """Insert attempts, before their processes are started."""
        with self._session() as session:
            session.add_all(rows)

    def change_attempt(self, run_id: str, worker: str, incarnation: int, **values: Any) -> None:
        """Update columns of an attempt."""
        of = (AttemptRow.run_id == run_id, AttemptRow.worker == worker, AttemptRow.incarnation == incarnation)
        with self._session() as session:
            session.execute(update(AttemptRow).where(*of).values(**values))

    def attempts(self, run_id: str, *, launch: int | None = None) -> list[AttemptRow]:
        """Return the attempts of a run, oldest first; of one launch only if given."""
        query = select(AttemptRow).where(AttemptRow.run_id == run_id).order_by(AttemptRow.id)
        if launch is not None:
            query = query.where(AttemptRow.launch == launch)
        with self._reading() as session:
            return list(session.scalars(query))

    def set_group(self, row: GroupRow) -> None:
        """Insert or replace the counts of a group."""
        with self._session() as session:
            session.merge(row)

    def groups(self, run_id: str) -> dict[str, GroupRow]:
        """Return the groups of a run by name."""
        with self._reading() as session:
            return {row.name: row for row in session.scalars(select(GroupRow).where(GroupRow.run_id == run_id))}

    def remove_groups(self, run_id: str) -> None:
        """Delete all groups of a run, which resets their counts."""
        with self._session() as session:
            session.execute(delete(GroupRow).where(GroupRow.run_id == run_id))

    def add_note(self, run_id: str, message: str, *, worker: str = "") -> None:
        """Insert a note about a run."""
        with self._session() as session:
            session.add(NoteRow(run_id=run_id, at=now(), worker=worker, message=message))

    def notes(self, run_id: str, *, after: int = 0, limit: int = 1000) -> list[NoteRow]:
        """Return the last `limit` notes of a run with an id above `after`, oldest first."""
        query = select(NoteRow).where(NoteRow.run_id == run_id, NoteRow.id > after)
        with self._reading() as session:
            return list(reversed(session.scalars(query.order_by(NoteRow.id.desc()).limit(limit)).all()))

    # Sessions

    def _one(self, condition: Any) -> RunRow | None:
        with self._reading() as session:
            return session.scalars(select(RunRow).where(condition).limit(1)).first()

    @contextmanager
    def _session(self) -> Iterator[Session]:
        with self._errors(), Session(self._engine, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        """Open a session whose rows outlive it, detached."""
        with self._errors(), Session(self._engine, expire_on_commit=False) as session:
            yield session
            session.expunge_all()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except IntegrityError:
            raise
        except SQLAlchemyError as error:
            reason = str(getattr(error, "orig", None) or error).splitlines()[0]
            raise StoreError(f"the control plane's database {self._engine.url.database}: {reason}") from error


def _configure(connection: Any, _record: object) -> None:
    # With WAL, readers never wait for the writer; NORMAL commits survive a killed process, though not every power cut.
    for line in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {line}")


def _create(path: Path) -> None:
    """Write a new database, without the write-ahead log, whose files would have to be moved with it."""
    engine = create_engine(f"sqlite:///{path}")
    try:
        _create_or_check(engine)
    except SQLAlchemyError as error:
        raise StoreError(f"cannot create the control plane's database {path}: {error}".splitlines()[0]) from error
    finally:
        engine.dispose()


def _create_or_check(engine: Engine) -> None:
    """Create the tables of a new database; refuse one of another schema version."""
    with engine.begin() as connection:
        # sqlite3 opens no transaction for DDL: without one, a crash leaves half a schema behind.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        if not inspect(connection).get_table_names():
            Base.metadata.create_all(connection)
            connection.exec_driver_sql(f"PRAGMA user_version = {VERSION}")
            return
        version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
    if version != VERSION:
        raise StoreError(
            f"{engine.url.database} has database version {version}, this xtoken supports version {VERSION}: use the "
            "xtoken that wrote it, or another --runs-dir"
        )


__all__ = ["VERSION", "AttemptRow", "Base", "GroupRow", "NoteRow", "RunRow", "Store", "StoreError", "TakenError", "now"]


class StoreError(XtokenError):
    """The database cannot be read or written."""

    status = 503


def create_private(path: Path, create: Callable[[Path], None]) -> None:
    """Create a database for this user alone: whole or not at all, so that a later empty file is known to be damaged.

    Args:
        path: The file; nothing is done if it exists.
        create: Writes a new database to the file that it is given.

    Raises:
        StoreError: It cannot be created.
    """
    if os.path.lexists(path):
        return
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    with os_errors_as(StoreError, f"cannot create the control plane's database {path}"):
        os.close(os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            create(scratch)
            os.link(scratch, path)
        except FileExistsError:  # another process was first
            pass
        finally:
            for name in ("", *SIDE_FILES):
                Path(f"{scratch}{name}").unlink(missing_ok=True)


class DatabaseFile:
    """An existing database file.

    Args:
        path: The file. Its mode is changed to 0600 if other users may read it.

    Raises:
        StoreError: It is empty or damaged, is no regular file, or belongs to another user.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        status = self._status()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise StoreError(f"the control plane's database {path} must be a regular file of this user")
        self._inode, self._size = status.st_ino, 0
        for name in ("", *SIDE_FILES):
            with suppress(FileNotFoundError):  # another process may end its transaction, and remove the file
                file = Path(f"{path}{name}")
                mode = file.lstat().st_mode
                if stat.S_ISREG(mode) and stat.S_IMODE(mode) & 0o077:
                    file.chmod(0o600)
        self._check_at = 0.0
        self.check()

    def check(self) -> None:
        """Check that the file is still there, has not shrunk and, every few seconds, that its content is sound.

        Raises:
            StoreError: It is not; the text names the file.
        """
        status = self._status()
        if status.st_ino != self._inode:
            raise StoreError(f"the control plane's database {self._path} was replaced while it was served: {REMEDY}")
        if status.st_size == 0:
            raise StoreError(f"the control plane's database {self._path} is empty: {REMEDY}")
        if status.st_size < self._size:  # SQLite never shortens it: nothing here vacuums
            raise StoreError(f"the control plane's database {self._path} was cut short: {REMEDY}")
        self._size = status.st_size
        if time.monotonic() >= self._check_at:
            began = time.monotonic()
            self._check_content()
            self._check_at = time.monotonic() + max(CHECK_S, CHECK_FRACTION * (time.monotonic() - began))

    def _check_content(self) -> None:
        try:
            # A connection of its own has no cached pages, which would hide damage on the disk.
            connection = sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=rw", uri=True)
            try:
                answer = connection.execute("PRAGMA quick_check(1)").fetchone()
            finally:
                connection.close()
        except sqlite3.OperationalError as error:
            raise StoreError(f"the control plane's database {self._path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise StoreError(f"the control plane's database {self._path} is damaged: {error}: {REMEDY}") from error
        if answer != ("ok",):
            reason = str(answer[0] if answer else "no answer").splitlines()[0]
            raise StoreError(f"the control plane's database {self._path} is damaged: {reason}: {REMEDY}")

    def _status(self) -> os.stat_result:
        try:
            return self._path.lstat()
        except OSError as error:
            raise StoreError(f"the control plane's database {self._path}: {error.strerror}: {REMEDY}") from error
