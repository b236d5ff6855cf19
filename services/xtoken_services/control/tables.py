"""Tables of the control plane's database: runs, attempts (process starts), process groups and notes."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from xtoken_services.common.run.status import RunStatus, RunSummary


class Base(DeclarativeBase):
    """Declarative base."""

    type_annotation_map = {dict[str, Any]: JSON}  # noqa: RUF012 - read by SQLAlchemy, never changed


class RunRow(Base):
    """A run.

    Attributes:
        seq: Sequence number in order of creation; the cursor of pages.
        spec: Specification as JSON, with absolute paths.
        launch: Number of the current launch: 1 for the first, one more with every resume.
        queue: Addresses of the queues (`urls`), their `keys` and the private directory (`private`), once assigned.
        key: Idempotency key of the request that created the run.
        digest: SHA-256 of that request's specification.
        description: What a user has written about the run.
    """

    __tablename__ = "runs"
    __table_args__ = (Index("ix_runs_state_seq", "state", "seq"), {"sqlite_autoincrement": True})

    seq: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(unique=True)
    name: Mapped[str]
    output: Mapped[str] = mapped_column(unique=True)
    created: Mapped[str]
    spec: Mapped[dict[str, Any]]
    state: Mapped[str]
    error: Mapped[str] = mapped_column(default="")
    exit_code: Mapped[int | None]
    step: Mapped[int | None]
    steps: Mapped[int | None]
    launch: Mapped[int] = mapped_column(default=1)
    began: Mapped[str | None]
    ended: Mapped[str | None]
    queue: Mapped[dict[str, Any] | None]
    key: Mapped[str | None] = mapped_column(unique=True)
    digest: Mapped[str | None]
    description: Mapped[str] = mapped_column(default="")

    def status(self) -> RunStatus:
        """Return the run as the database knows it."""
        known = {name: getattr(self, name) for name in RunSummary.model_fields}
        return RunStatus.model_validate(known | {"spec": self.spec})


class AttemptRow(Base):
    """One start of a worker process.

    Attributes:
        launch: Launch of the run that the attempt belongs to.
        identity: Identifies the process to its launcher; None until the process has been started.
        exit_code: Exit status, -N after signal N; None while the process runs, or if the status is unknown.
    """

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("run_id", "worker", "incarnation"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), index=True)
    launch: Mapped[int]
    worker: Mapped[str]
    kind: Mapped[str]
    incarnation: Mapped[int]
    identity: Mapped[dict[str, Any] | None]
    log: Mapped[str]
    started: Mapped[str]
    ended: Mapped[str | None]
    exit_code: Mapped[int | None]


class GroupRow(Base):
    """Failure counts of a process group, which a restarted control plane continues."""

    __tablename__ = "groups"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    restarts: Mapped[int]
    failures: Mapped[int]
    highest_step: Mapped[int]


class NoteRow(Base):
    """An event in a run's history."""

    __tablename__ = "notes"
    __table_args__ = {"sqlite_autoincrement": True}  # noqa: RUF012 - read by SQLAlchemy, never changed

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), index=True)
    at: Mapped[str]
    worker: Mapped[str] = mapped_column(default="")
    message: Mapped[str]
