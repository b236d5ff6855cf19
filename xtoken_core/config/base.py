"""The base class of all parts of the configuration."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from xtoken_core.errors import ConfigError

Count = Annotated[int, Field(ge=1)]


class Described(BaseModel):
    """Base of models whose fields are described by the strings after them.

    The strings are read from the source when a JSON schema or a page needs them. With pydantic's
    `use_attribute_docstrings` the import reads them, which costs every process of a run 70 ms.
    """

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Return the description of each field that has one, also of the base classes'."""
        found = {}
        for base in reversed(cls.__mro__):
            if issubclass(base, Described) and base is not Described:
                (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
                assert isinstance(tree, ast.ClassDef)
                for field, after in pairwise(tree.body):
                    match field, after:
                        case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                            found[name] = inspect.cleandoc(text)
        return found

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        fields = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in cls.descriptions().items():
            if name in fields:
                fields[name].setdefault("description", text)
        return schema


class ConfigModel(Described):
    """A part of the configuration: unknown fields are refused, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


NONE = "none"
"""None in a run file: TOML has no other way to say it."""
T = TypeVar("T")


NoneWord = BeforeValidator(lambda value: None if value == NONE else value)
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
