"""A teacher that is the student itself: its first weights, or a moving average of those that are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xtoken_core.config.spec import RunSpec

STUDENT = "student"
"""`teacher.model` of a teacher that is the student; a directory of that name is `./student`."""
OF_THE_STUDENT = ("tokenizer", "chat_template", "dtype")
"""What such a teacher has of the student unless it is set."""


def with_teachers(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's document with its teachers as a list, of which those that are the student name its model.

    Args:
        document: As a run file has it; what is no table is left as it is.
    """
    teachers, student = document.get("teacher", ()), document.get(STUDENT)
    listed = [teachers] if isinstance(teachers, Mapping) else teachers
    if not isinstance(listed, (list, tuple)) or not isinstance(student, Mapping) or "model" not in student:
        return {**document, "teacher": listed}
    shared = {name: student[name] for name in OF_THE_STUDENT if name in student}
    made = (
        {**shared, **each, "model": student["model"]} if isinstance(each, Mapping) and is_student(each) else each
        for each in listed
    )
    return {**document, "teacher": list(made)}


def is_student(teacher: Mapping[str, Any], model: object = STUDENT) -> bool:
    """Return whether a teacher's table names the student, or a model."""
    return str(teacher.get("model")) == str(model)


def check_sync(run: RunSpec) -> None:
    """Refuse moving weights of a teacher that is not the student, or whose weights cannot be replaced.

    Raises:
        ValueError: The first reason, and what to change.
    """
    for number, teacher in enumerate(run.teacher):
        name = f"teacher.{number}"
        if teacher.sync is None:
            if teacher.sync_decay is not None:
                raise ValueError(f'{name}.sync_decay belongs to {name}.sync = "ema": set that, or unset it')
            continue
        if teacher.model != run.student.model:
            raise ValueError(f'{name}.sync is for a teacher that is the student: set {name}.model = "student"')
        whole = teacher.loads_model and teacher.gpus == 1 and not teacher.quantized
        alike = teacher.dtype == run.student.dtype and run.content_of(number) != "hidden"
        if not whole or not alike or run.workers.transport == "queue":
            raise ValueError(
                f"{name}.sync replaces the weights of a model that runs beside the student in its dtype: unset url, "
                'store, gpus, quantized, dtype, content = "hidden" and workers.transport = "queue"'
            )
