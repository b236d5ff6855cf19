"""Fields of the form for new runs, from the configuration models: kinds, defaults and descriptions."""

from __future__ import annotations

import inspect
import json
import re
import types
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from xtoken_core.config.base import ConfigModel
from xtoken_core.config.spec import RunSpec
from xtoken_services.common.run.defaults import FILLED
from xtoken_services.control.web.loss_terms import MODES_OF_SETTING

TEACHER = "teacher"
EXCLUDED = ("push_to", "queue.address", "ray.address")
"""Settings that the control plane refuses or assigns."""
TEXTS = ("eval.samples.prompts",)
"""Lists of texts that may hold commas."""
MODEL = "The model's directory: `config.json` and `.safetensors` weights."
AUTOMATIC = (*FILLED, "eval.path", "loss.kl_loss_weight_end")
"""Settings whose default is not one value: models, text and machine decide it, or other settings."""
HELP = {
    "output": (
        "The directory the run writes: checkpoints, logs, curves, the exported model. Pushing the model to the Hub "
        "(`push_to`) is for `xtoken run`."
    ),
    "eval.path": "Same forms as `data.path`. Left empty, a part of the text is held back.",
    "student.model": MODEL,
    "teacher.model": MODEL,
    "data.path": (
        "A file or files (`.jsonl`, `.parquet`, `.txt`), or a directory saved by `datasets`. Required without "
        "`data.sources`."
    ),
}
"""Descriptions where a control plane takes less than a run file: it fetches and converts nothing."""
REFUSED_MODES = ("custom",)
"""Modes of the loss that a control plane does not run."""
SPELLING = {word: word.upper() for word in ("alm", "ce", "eos", "fp8", "gpu", "kl", "nf4", "tflops", "uld")} | {
    "s": "(s)",
    "topk": "top k",
    "xtoken": "H-KL",
    "tensorboard": "TensorBoard",
    "wandb": "Weights & Biases",
}
"""Spelling of words of setting names in labels."""


@dataclass(frozen=True)
class Field:
    """A form field.

    Attributes:
        name: Dotted name of the setting; a teacher's begins with `teacher.`, without an index.
        kind: `text`, `path`, `paths`, `integer`, `number`, `choice`, `switch`, `list`, or `json` for tables.
        default: Default as text; empty if there is none, or if it is `automatic`.
        help: Description from the configuration model.
        required: True if the setting has no default.
        automatic: True if models, text, machine or other settings decide what is left empty.
        choices: Values of a `choice`.
        modes: Modes of the loss that read the setting; empty if all do.
    """

    name: str
    kind: str
    default: str
    help: str
    required: bool
    choices: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    automatic: bool = False

    @property
    def key(self) -> str:
        """Last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def help_by_choice(self) -> dict[str, str]:
        """Parts of the description that begin with a choice in backticks, by choice; empty if some choice has none."""
        parts = re.split(r"`(\w+)`: ", self.help)
        texts = dict(zip(parts[1::2], map(str.strip, parts[2::2]), strict=True))
        return texts if self.choices and texts.keys() >= set(self.choices) else {}

    @property
    def label(self) -> str:
        """Label: the last part of the name, as words."""
        words = [SPELLING.get(word, word) for word in self.key.split("_")]
        return " ".join([words[0][:1].upper() + words[0][1:], *words[1:]])


@dataclass(frozen=True)
class Section:
    """Form fields of a section of the run file.

    Attributes:
        name: Name of the section; empty for the top level.
        optional: True if a run file may omit the section.
        help: Description from the configuration model.
        fields: Fields of the section, without those of its subsections.
    """

    name: str
    optional: bool
    help: str
    fields: tuple[Field, ...]


@cache
def sections() -> dict[str, Section]:
    """Return all sections by name, in the order of the models."""
    collected: dict[str, Section] = {}
    _collect(RunSpec, "", False, collected)
    return collected


@cache
def field_names() -> frozenset[str]:
    """Return the names of all fields, a teacher's without an index."""
    return frozenset(field.name for section in sections().values() for field in section.fields)


def _collect(model: type[ConfigModel], name: str, optional: bool, collected: dict[str, Section]) -> None:
    own: list[Field] = []
    collected[name] = Section(name, optional, "", ())  # reserves the place in the order
    for key, info in model.model_fields.items():
        path = f"{name}.{key}" if name else key
        part, absent = _part_of(info.annotation)
        if part is not None and (path == TEACHER or _kind(info.annotation)[0] != "json"):
            _collect(part, path, absent, collected)
        elif path not in EXCLUDED:
            own.append(_field(path, info, " ".join((info.description or "").split())))
    collected[name] = Section(name, optional, (inspect.getdoc(model) or "").partition("\n")[0], tuple(own))


def _field(name: str, info: FieldInfo, doc: str) -> Field:
    kind, choices = _kind(info.annotation)
    kind = "json" if name in TEXTS else kind
    automatic = name in AUTOMATIC
    default = "" if info.default is PydanticUndefined or automatic else format_value(info.default, kind)
    if name == "loss.mode":
        choices = tuple(choice for choice in choices if choice not in REFUSED_MODES)
    of = MODES_OF_SETTING.get(name.removeprefix("loss."), ()) if name.startswith("loss.") else ()
    return Field(
        name,
        kind,
        default,
        HELP.get(name, doc),
        info.is_required() and not automatic,
        choices,
        tuple(sorted(of)),
        automatic,
    )


def format_value(value: Any, kind: str) -> str:
    """Format a value as the text of its field."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else ""
    if kind == "json":
        return json.dumps(value, ensure_ascii=False, default=str) if value else ""
    if isinstance(value, (list, tuple)):
        return ("\n" if kind == "paths" else ", ").join("none" if item is None else str(item) for item in value)
    if isinstance(value, float):
        return short if float(short := f"{value:g}") == value else repr(value)
    return str(value)


def _part_of(annotation: Any) -> tuple[type[ConfigModel] | None, bool]:
    """Return the model of a section field, or of the items of a tuple of sections; and True if it is optional."""
    options = [option for option in _options(annotation) if option is not type(None)]
    if get_origin(options[0]) is tuple:
        options = [get_args(options[0])[0]]
    if isinstance(options[0], type) and issubclass(options[0], ConfigModel):
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
    if get_origin(first) is dict:
        return "json", ()
    if get_origin(first) is tuple:
        item = get_args(first)[0]
        return "json" if isinstance(item, type) and issubclass(item, ConfigModel) else "list", ()
    return {bool: "switch", int: "integer", float: "number"}.get(first, "text"), ()


def _options(annotation: Any) -> list[Any]:
    """Return the members of a union, without annotations."""
    if get_origin(annotation) is Annotated:
        return _options(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [option for arm in get_args(annotation) for option in _options(arm)]
    return [annotation]
