"""What the control plane keeps in its database: runs, every start of a process, and what has happened."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, MetaData, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_name)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    """The declarative base: constraints have names, so that a migration can change them."""

    metadata = MetaData(naming_convention=NAMES)
    type_annotation_map = {dict[str, Any]: JSON}  # noqa: RUF012 - read by SQLAlchemy, never changed


class RunRow(Base):
    """A run.

    Attributes:
        seq: Its place in the order of creation: what pages go by.
        spec: The specification as JSON, its paths absolute.
        life: How often it has been started, from 1.
        queue: Where its queue is (`url`, `token_file`) and its private directory (`private`), once it has one.
        key: The idempotency key it was started with.
        digest: Of the request that was sent with the key.
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
    life: Mapped[int] = mapped_column(default=1)
    began: Mapped[str | None]
    ended: Mapped[str | None]
    queue: Mapped[dict[str, Any] | None]
    key: Mapped[str | None] = mapped_column(unique=True)
    digest: Mapped[str | None]


class AttemptRow(Base):
    """One start of one process.

    Attributes:
        identity: What its launcher finds it by; None between the intention to start it and its start.
        exit_code: Its status, -N for a death by signal N; None while it lives, and where nobody saw it end.
    """

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("run_id", "worker", "incarnation"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), index=True)
    life: Mapped[int]
    worker: Mapped[str]
    kind: Mapped[str]
    incarnation: Mapped[int]
    identity: Mapped[dict[str, Any] | None]
    log: Mapped[str]
    started: Mapped[str]
    ended: Mapped[str | None]
    exit_code: Mapped[int | None]


class GroupRow(Base):
    """How often a group of processes has failed, so that a new control plane counts on."""

    __tablename__ = "groups"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    restarts: Mapped[int]
    failures: Mapped[int]
    highest_step: Mapped[int]


class NoteRow(Base):
    """Something that has happened to a run."""

    __tablename__ = "notes"
    __table_args__ = {"sqlite_autoincrement": True}  # noqa: RUF012 - read by SQLAlchemy, never changed

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), index=True)
    at: Mapped[str]
    worker: Mapped[str] = mapped_column(default="")
    message: Mapped[str]
