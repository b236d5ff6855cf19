"""Checks of a run's teachers against the student's tokenizer, before anything is built or loaded. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from xtoken_core.config.resolved import ResolvedModel
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError


def same_tokenizer_of(spec: RunSpec, student: ResolvedModel, teachers: Sequence[ResolvedModel]) -> list[bool]:
    """Return for each teacher True if it has the student's tokenizer and no projection is named."""
    return [
        of_run.projection is None and files.tokenizer_fingerprint == student.tokenizer_fingerprint
        for of_run, files in zip(spec.teacher, teachers, strict=True)
    ]


def check_teachers(spec: RunSpec, student: ResolvedModel, teachers: Sequence[ResolvedModel]) -> None:
    """Refuse settings of the loss that these teachers' tokenizers make impossible.

    Raises:
        ConfigError: With the reason and what to change.
    """
    try:
        same_tokenizer = same_tokenizer_of(spec, student, teachers)
        spec.loss.check_teachers([t.weight for t in spec.teacher], same_tokenizer)
        if spec.rollout is not None and any(same_tokenizer):
            name = spec.teacher_name(same_tokenizer.index(True))
            raise ValueError(
                f"{name} has the student's tokenizer, and [rollout] takes teachers with tokenizers of their "
                "own: name a projection, or unset one of them"
            )
        for number, same in enumerate(same_tokenizer):
            if same:
                _check_same_tokenizer(spec, number)
        spec.loss.check_topk([t.content == "topk" for t in spec.teacher], same_tokenizer)
    except ValueError as error:
        raise ConfigError(f"loss: {error}") from error


def _check_same_tokenizer(spec: RunSpec, number: int) -> None:
    """Refuse settings that a teacher with the student's tokenizer cannot have, as it reads the student's tokens.

    Raises:
        ValueError: With the setting.
    """
    teacher, length = spec.teacher[number], spec.student.context_length
    if teacher.special_tokens:
        raise ValueError(f"teacher.{number}.special_tokens: this teacher has the student's tokenizer: unset it")
    if teacher.context_length < length:
        raise ValueError(
            f"teacher.{number}.context_length = {teacher.context_length}: this teacher has the student's tokenizer and "
            f"reads the student's tokens, up to {length} (student.context_length): make it at least as long, or lower "
            "student.context_length"
        )
