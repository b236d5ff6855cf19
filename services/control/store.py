"""The control plane's SQLite database: in the runs' directory, or in memory for tests and tools."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, delete, event, func, inspect, or_, select, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.pool import StaticPool

from services.control.tables import AttemptRow, Base, GroupRow, NoteRow, RunRow
from services.supervisor.run_record import RunState
from xtoken_core.errors import XtokenError

FILE = ".control.sqlite3"
VERSION = 1
"""The number of the schema in `tables`, written to `PRAGMA user_version`; raise it with every change of a table."""
BUSY_S = 10.0
SUMMARY = (
    RunRow.seq, RunRow.id, RunRow.name, RunRow.output, RunRow.created, RunRow.state, RunRow.error, RunRow.exit_code,
    RunRow.step, RunRow.steps, RunRow.life, RunRow.began, RunRow.ended,
)  # fmt: skip
SUMMARY_NAMES = tuple(column.key for column in SUMMARY)


class StoreError(XtokenError):
    """The database cannot be read or written."""

    status = 503


class TakenError(XtokenError):
    """Another run has this output directory or idempotency key."""

    status = 409


def now() -> str:
    """The time, as the database writes it: UTC, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Store:
    """Runs, attempts, groups and notes.

    Its methods may be called from any thread. Rows that they return are the caller's own: changing them changes nothing
    here.

    Args:
        directory: Where the database is; None keeps it in memory.

    Raises:
        StoreError: It cannot be opened, or a later version of xtoken has written it.
    """

    def __init__(self, directory: Path | None) -> None:
        self._guard: AbstractContextManager[Any]
        if directory is None:
            # One connection for all threads, so one at a time.
            self._guard = threading.RLock()
            shared = {"check_same_thread": False}
            self._engine = create_engine("sqlite://", poolclass=StaticPool, connect_args=shared)
        else:
            self._guard = nullcontext()
            self._engine = create_engine(f"sqlite:///{directory / FILE}", connect_args={"timeout": BUSY_S})
        event.listen(self._engine, "connect", _configure)
        with self._errors():
            _create_or_check(self._engine)

    def close(self) -> None:
        """Let its connections go."""
        self._engine.dispose()

    # Runs

    def add(self, row: RunRow) -> RunRow:
        """Remember a run.

        Raises:
            TakenError: Its output or key is another run's.
        """
        try:
            with self._session() as session:
                session.add(row)
        except IntegrityError as error:
            raise TakenError(f"output: {row.output} belongs to another run, or is being given to one") from error
        return row

    def run(self, run_id: str) -> RunRow | None:
        """A run by its id."""
        return self._one(RunRow.id == run_id)

    def run_with_key(self, key: str) -> RunRow | None:
        """The run that was started with this idempotency key."""
        return self._one(RunRow.key == key)

    def run_around(self, output: Path) -> RunRow | None:
        """A run whose output is this directory, lies in it, or holds it."""
        below = str(output).replace("\\", "\\\\").replace("%", r"\%").replace("_", r"\_") + "/%"
        above = [str(parent) for parent in (output, *output.parents)]
        return self._one(or_(RunRow.output.in_(above), RunRow.output.like(below, escape="\\")))

    def unfinished(self) -> list[RunRow]:
        """Runs that are not over, the oldest first."""
        over = [state for state in RunState if state.over]
        with self._reading() as session:
            return list(session.scalars(select(RunRow).where(RunRow.state.not_in(over)).order_by(RunRow.seq)))

    def page(
        self, limit: int, *, before: int | None = None, states: Sequence[RunState] = (), name: str = ""
    ) -> list[dict[str, Any]]:
        """Summaries of runs, the newest first.

        Args:
            limit: How many at most.
            before: Only runs with a smaller `seq`.
            states: Only runs in one of these states; all if empty.
            name: Only runs of this name; all if empty.
        """
        query = select(*SUMMARY).order_by(RunRow.seq.desc()).limit(limit)
        if before is not None:
            query = query.where(RunRow.seq < before)
        if states:
            query = query.where(RunRow.state.in_(states))
        if name:
            query = query.where(RunRow.name == name)
        with self._guard, self._errors(), self._engine.connect() as connection:
            return [dict(zip(SUMMARY_NAMES, row, strict=True)) for row in connection.execute(query)]

    def counts(self) -> dict[str, int]:
        """How many runs are in each state."""
        with self._reading() as session:
            found = session.execute(select(RunRow.state, func.count()).group_by(RunRow.state))
            return dict(found.all())

    def change(self, run_id: str, **values: Any) -> None:
        """Set columns of a run."""
        with self._session() as session:
            session.execute(update(RunRow).where(RunRow.id == run_id).values(**values))

    def remove(self, run_id: str) -> None:
        """Forget a run and everything about it."""
        with self._session() as session:
            session.execute(delete(RunRow).where(RunRow.id == run_id))

    # What a run's processes did

    def intend(self, rows: Sequence[AttemptRow]) -> None:
        """Processes are about to be started."""
        with self._session() as session:
            session.add_all(rows)

    def attempt(self, run_id: str, worker: str, incarnation: int, **values: Any) -> None:
        """Set columns of one start."""
        of = (AttemptRow.run_id == run_id, AttemptRow.worker == worker, AttemptRow.incarnation == incarnation)
        with self._session() as session:
            session.execute(update(AttemptRow).where(*of).values(**values))

    def attempts(self, run_id: str, *, life: int | None = None) -> list[AttemptRow]:
        """Starts of a run's processes, the oldest first; of one of its lives if that is given."""
        query = select(AttemptRow).where(AttemptRow.run_id == run_id).order_by(AttemptRow.id)
        if life is not None:
            query = query.where(AttemptRow.life == life)
        with self._reading() as session:
            return list(session.scalars(query))

    def set_group(self, row: GroupRow) -> None:
        """Renew a group's counts."""
        with self._session() as session:
            session.merge(row)

    def groups(self, run_id: str) -> dict[str, GroupRow]:
        """The groups of a run by name."""
        with self._reading() as session:
            return {row.name: row for row in session.scalars(select(GroupRow).where(GroupRow.run_id == run_id))}

    def drop_groups(self, run_id: str) -> None:
        """Begin to count anew."""
        with self._session() as session:
            session.execute(delete(GroupRow).where(GroupRow.run_id == run_id))

    def note(self, run_id: str, message: str, *, worker: str = "") -> None:
        """Something has happened."""
        with self._session() as session:
            session.add(NoteRow(run_id=run_id, at=now(), worker=worker, message=message))

    def notes(self, run_id: str, *, after: int = 0, limit: int = 1000) -> list[NoteRow]:
        """What has happened to a run: the last `limit` notes with an id beyond `after`, in order."""
        query = select(NoteRow).where(NoteRow.run_id == run_id, NoteRow.id > after)
        with self._reading() as session:
            return list(reversed(session.scalars(query.order_by(NoteRow.id.desc()).limit(limit)).all()))

    # Plumbing

    def _one(self, condition: Any) -> RunRow | None:
        with self._reading() as session:
            return session.scalars(select(RunRow).where(condition).limit(1)).first()

    @contextmanager
    def _session(self) -> Iterator[Session]:
        with self._guard, self._errors(), Session(self._engine, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        """Open a session whose rows outlive it, detached."""
        with self._guard, self._errors(), Session(self._engine, expire_on_commit=False) as session:
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
    # Readers never wait for the writer; a commit survives the death of this process, though not every power cut.
    for line in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {line}")


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
