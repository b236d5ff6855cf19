"""Runs, attempts, groups and notes.

Revision ID: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    _runs()
    _attempts()
    _groups_and_notes()


def _runs() -> None:
    op.create_table(
        "runs",
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("output", sa.String, nullable=False),
        sa.Column("created", sa.String, nullable=False),
        sa.Column("spec", sa.JSON, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("error", sa.String, nullable=False),
        sa.Column("exit_code", sa.Integer),
        sa.Column("step", sa.Integer),
        sa.Column("steps", sa.Integer),
        sa.Column("life", sa.Integer, nullable=False),
        sa.Column("began", sa.String),
        sa.Column("ended", sa.String),
        sa.Column("queue", sa.JSON),
        sa.Column("key", sa.String),
        sa.Column("digest", sa.String),
        sa.PrimaryKeyConstraint("seq", name="pk_runs"),
        sa.UniqueConstraint("id", name="uq_runs_id"),
        sa.UniqueConstraint("output", name="uq_runs_output"),
        sa.UniqueConstraint("key", name="uq_runs_key"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_runs_state_seq", "runs", ["state", "seq"])


def _attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("id", sa.Integer, nullable=False),
        _run_id("attempts"),
        sa.Column("life", sa.Integer, nullable=False),
        sa.Column("worker", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("incarnation", sa.Integer, nullable=False),
        sa.Column("identity", sa.JSON),
        sa.Column("log", sa.String, nullable=False),
        sa.Column("started", sa.String, nullable=False),
        sa.Column("ended", sa.String),
        sa.Column("exit_code", sa.Integer),
        sa.PrimaryKeyConstraint("id", name="pk_attempts"),
        sa.UniqueConstraint("run_id", "worker", "incarnation", name="uq_attempts_run_id"),
    )
    op.create_index("ix_attempts_run_id", "attempts", ["run_id"])


def _groups_and_notes() -> None:
    op.create_table(
        "groups",
        _run_id("groups"),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("restarts", sa.Integer, nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("highest_step", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("run_id", "name", name="pk_groups"),
    )
    op.create_table(
        "notes",
        sa.Column("id", sa.Integer, nullable=False),
        _run_id("notes"),
        sa.Column("at", sa.String, nullable=False),
        sa.Column("worker", sa.String, nullable=False),
        sa.Column("message", sa.String, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_notes"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_notes_run_id", "notes", ["run_id"])


def _run_id(table: str) -> sa.Column[str]:
    key = sa.ForeignKey("runs.id", ondelete="CASCADE", name=f"fk_{table}_run_id_runs")
    return sa.Column("run_id", sa.String, key, nullable=False)
