"""The base class of all parts of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from xtoken_core.errors import ConfigError

Count = Annotated[int, Field(ge=1)]


class ConfigModel(BaseModel):
    """A part of the configuration: unknown fields are refused, values are immutable."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


NONE = "none"
"""None in a run file: TOML has no other way to say it."""
T = TypeVar("T")


def _read_none(value: Any) -> Any:
    return None if value == NONE else value


NoneWord = BeforeValidator(_read_none)
OrNone = Annotated[T | None, NoneWord]
"""A setting that takes the word "none", because None is not its default everywhere."""


def teacher_name(number: int, count: int) -> str:
    """Return a teacher as messages name it: with its number if there are several.

    >>> teacher_name(0, 1), teacher_name(0, 2)
    ('teacher', 'teacher 0')

    Args:
        number: The teacher's, from 0.
        count: How many there are.
    """
    return f"teacher {number}" if count > 1 else "teacher"


def absolute_path(path: str | Path, base: Path) -> Path:
    """Return a path, which may begin with `~`, as absolute against `base`.

    Raises:
        ConfigError: It begins with `~name` of an unknown user.
    """
    try:
        return base / Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{str(path)!r}: there is no home directory of that user: write the whole path") from error
