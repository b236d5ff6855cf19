"""Validation errors of a configuration as one line that names the field and the values that it accepts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

FieldPath = tuple[int | str, ...]
TYPE_NAME = re.compile(r"constrained-\w+$|(tuple|literal|lax-or-strict|function-\w+)\[")
"""How pydantic names one of several types of a field, as a part of an error's path."""
NAMED_ELSEWHERE = {
    "lr": "train.learning_rate",
    "learning_rate": "train.learning_rate",
    "lr_scheduler_type": "train.schedule",
    "batch_size": "train.samples_per_step",
    "per_device_train_batch_size": "train.samples_per_step",
    "gradient_accumulation_steps": "train.micro_batch_tokens",
    "num_train_epochs": "data.epochs",
    "num_epochs": "data.epochs",
    "max_length": "student.context_length",
    "max_grad_norm": "train.grad_clip",
    "save_steps": "train.checkpoint_every",
    "bf16": "student.dtype",
}
"""Settings by the names that transformers and TRL give them."""

TAKES = {"model_type": "it takes a table of settings", "path_type": "it takes a path", "tuple_type": "it takes a list"}
"""Messages in place of pydantic's that name classes, by the error's type."""


def describe(error: ValidationError, model: type[BaseModel]) -> str:
    """Return all of pydantic's errors on one line by field; those of one that takes several types are alternatives.

    Args:
        error: The error as raised.
        model: The model that was validated.
    """
    messages: dict[str, list[str]] = {}
    for item in error.errors(include_url=False, include_context=False):
        messages.setdefault(field_of(item["loc"]), []).append(message_of(item, model))
    text = "; ".join(f"{field or 'the run'}: {', or '.join(dict.fromkeys(own))}" for field, own in messages.items())
    # Names of unknown fields are the file's own, line ends and control characters included.
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def field_of(path: FieldPath) -> str:
    """Return the field of an error's path, without pydantic's names of the types that it may have.

    >>> field_of(("rollout", "fraction", "tuple[constrained-float, constrained-float]", 1))
    'rollout.fraction.1'
    """
    return ".".join(str(part) for part in path if not TYPE_NAME.match(str(part)))


def message_of(item: Any, model: type[BaseModel]) -> str:
    """Return the message of one of pydantic's errors; that of an unknown field names those that there are.

    Args:
        item: The error.
        model: The model that was validated.
    """
    if item["type"] == "extra_forbidden":
        return _unknown_field(item["loc"], model)
    if item["type"] in TAKES:
        return TAKES[item["type"]]
    text: str = item["msg"].removeprefix("Value error, ")
    return text if item["type"] == "value_error" else text[:1].lower() + text[1:]


def _unknown_field(path: FieldPath, model: type[BaseModel]) -> str:
    """Return an unknown-field error that suggests the closest name or lists the valid ones."""
    own = next((sorted(part.model_fields) for part in _parts_at(path[:-1], model)), [])
    name = str(path[-1])
    named = NAMED_ELSEWHERE.get(name, "")
    key = named.rpartition(".")[2]
    meant = key if key in own else named or next(iter(get_close_matches(name, own, n=1)), "")
    if meant := meant or next(_fields_named(name, model), ""):
        return f"there is no such field; did you mean {meant}?"
    return f"there is no such field; there are {', '.join(own)}"


def _fields_named(name: str, model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Yield the fields of a name in a model and the tables below it, the outer ones first."""
    if name in model.model_fields:
        yield path + name
    for table, field in model.model_fields.items():
        for part in _models_in(field.annotation):
            yield from _fields_named(name, part, f"{path}{table}.")


def _parts_at(path: FieldPath, model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield the models that a path below a model may lead to."""
    if not path:
        yield model
        return
    first, *rest = path
    if isinstance(first, int):  # an item of a list is of the list's own part
        yield from _parts_at(tuple(rest), model)
    elif first in model.model_fields:
        for part in _models_in(model.model_fields[first].annotation):
            yield from _parts_at(tuple(rest), part)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models within a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
