"""The fields of a run's form, read off the configuration's models: their kinds, defaults and descriptions."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from xtoken_core.config.base import Part
from xtoken_core.config.spec import RunSpec

TEACHER = "teacher"
NOT_ASKED = ("queue.address", "ray.address")
"""What a control plane sets itself."""
SPELLED = {word: word.upper() for word in ("alm", "ce", "eos", "fp8", "gpu", "kl", "tflops", "uld")} | {
    "s": "(s)",
    "topk": "top k",
    "xtoken": "H-KL",
    "tensorboard": "TensorBoard",
    "wandb": "Weights & Biases",
}
"""Words of names that are written otherwise in a sentence."""


@dataclass(frozen=True)
class Field:
    """One field.

    Attributes:
        name: Its place in a run file, by dots; a teacher's begins with `teacher.`, without its number.
        kind: `text`, `path`, `paths`, `integer`, `number`, `choice`, `switch` or `list`.
        default: As the form shows it; empty if there is none.
        help: What the configuration says about it.
        choices: What a `choice` takes.
    """

    name: str
    kind: str
    default: str
    help: str
    required: bool
    choices: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Its last name, spelled out."""
        words = [SPELLED.get(word, word) for word in self.name.rpartition(".")[2].split("_")]
        return " ".join([words[0][:1].upper() + words[0][1:], *words[1:]])


@dataclass(frozen=True)
class Section:
    """The fields of a part.

    Attributes:
        name: The part's, as in a run file; empty for the run itself.
        optional: Whether a run may do without the part.
    """

    name: str
    optional: bool
    help: str
    fields: tuple[Field, ...]


@cache
def sections() -> dict[str, Section]:
    """Every part of a run by its name, in the order of the models."""
    found: dict[str, Section] = {}
    _collect(RunSpec, "", False, found)
    return found


@cache
def field_names() -> frozenset[str]:
    """The names of all fields, a teacher's without its number."""
    return frozenset(field.name for section in sections().values() for field in section.fields)


def _collect(model: type[Part], name: str, optional: bool, found: dict[str, Section]) -> None:
    told = _docstrings(model)
    own: list[Field] = []
    found[name] = Section(name, optional, "", ())
    for key, info in model.model_fields.items():
        place = f"{name}.{key}" if name else key
        part, absent = _part_of(info.annotation)
        if part is not None:
            _collect(part, place, absent, found)
        elif place not in NOT_ASKED:
            own.append(_field(place, info, told.get(key, "")))
    found[name] = Section(name, optional, (inspect.getdoc(model) or "").partition("\n")[0], tuple(own))


def _field(place: str, info: FieldInfo, told: str) -> Field:
    kind, choices = _kind(info.annotation)
    default = "" if info.default is PydanticUndefined else shown(info.default, kind)
    return Field(place, kind, default, told, info.is_required(), choices)


def shown(value: Any, kind: str) -> str:
    """A value as its field shows it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else ""
    if isinstance(value, (list, tuple)):
        return ("\n" if kind == "paths" else ", ").join("none" if item is None else str(item) for item in value)
    if isinstance(value, float):
        return short if float(short := f"{value:g}") == value else repr(value)
    return str(value)


def _part_of(annotation: Any) -> tuple[type[Part] | None, bool]:
    """The part that a field holds, and whether it may be left out; a tuple of parts is one part, several times."""
    options = [option for option in _options(annotation) if option is not type(None)]
    if get_origin(options[0]) is tuple:
        options = [get_args(options[0])[0]]
    if isinstance(options[0], type) and issubclass(options[0], Part):
        return options[0], type(None) in _options(annotation)
    return None, False


def _kind(annotation: Any) -> tuple[str, tuple[str, ...]]:
    options = [option for option in _options(annotation) if option is not type(None)]
    first = options[0]
    if first is Path and len(options) > 1:
        return "paths", ()
    if get_origin(first) is Literal:
        return "choice", tuple(map(str, get_args(first)))
    if first is Path:
        return "path", ()
    if get_origin(first) is tuple:
        return "list", ()
    return {bool: "switch", int: "integer", float: "number"}.get(first, "text"), ()


def _options(annotation: Any) -> list[Any]:
    """What a union takes, without what annotations say of it."""
    if get_origin(annotation) is Annotated:
        return _options(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [option for arm in get_args(annotation) for option in _options(arm)]
    return [annotation]


def _docstrings(model: type[Part]) -> dict[str, str]:
    """What stands below a model's fields, those of its bases included."""
    told: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not (issubclass(base, Part) and base is not Part):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for line, following in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                text = following.value if isinstance(following, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    told[line.target.id] = " ".join(text.value.split())
    return told
