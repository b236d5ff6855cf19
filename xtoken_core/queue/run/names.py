"""Roles, tasks and signal fields of a run, as they are named on the wire."""

from __future__ import annotations

from xtoken_core import schema

COLLATOR, TEACHER, TRAINER = "collator", "teacher", "trainer"
ROLLOUT = "rollout"
"""Role of a worker that completes prompts with the student."""
SUPERVISOR = "supervisor"
"""Role of the supervisor's session, which only reads statistics and gives a run up."""
TRAIN = "train"
"""The student's task."""


def teacher_task(teacher: int) -> str:
    """Return the name of a teacher's task."""
    return f"teacher_{teacher}"


def signal_fields(teachers: int) -> tuple[str, ...]:
    """Return the volatile field of each teacher's signal."""
    return tuple(schema.field_name(schema.TEACHER_LOGITS, i) for i in range(teachers))
