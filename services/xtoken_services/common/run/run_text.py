"""Runs as the text of a run file: with all settings, or without those that have their default."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import tomli_w
from pydantic import ValidationError

from xtoken_core.config.base import NONE, ConfigModel, NoneWord
from xtoken_core.config.spec import RunSpec
from xtoken_services.common.run.defaults import FILLED

BY_OTHERS = ("mode", "kl_loss_weight_end", "ce_loss_scale", "beta")
"""Settings of the loss whose defaults depend on other settings."""
MAY_GO = ("loss.kl_loss_weight_end", "loss.beta", "train.learning_rate", "rollout.teacher_temperature")
"""Settings that are left out where others decide that they are what they are."""


def to_toml(document: Mapping[str, Any]) -> str:
    """Return a document as the text of a run file; None, which TOML lacks, is left out.

    >>> print(to_toml({"name": "a", "output": None, "teacher": [{"model": "t"}]}), end="")
    name = "a"
    <BLANKLINE>
    [[teacher]]
    model = "t"
    """
    values, tables = {}, []
    for name, part in without_none(document).items():
        if isinstance(part, Mapping):
            tables.append(tomli_w.dumps({name: part}))
        elif isinstance(part, list) and part and all(isinstance(each, Mapping) for each in part):
            # tomli_w would write short tables of a list into one line.
            tables += [tomli_w.dumps({name: each}).replace(f"[{name}]", f"[[{name}]]", 1) for each in part]
        else:
            values[name] = part
    return "\n".join([tomli_w.dumps(values), *tables] if values else tables)


def resolved_text(spec: RunSpec, notes: Sequence[str], *, as_json: bool = False) -> str:
    """Return a specification as the text of a run file, the defaults that were filled in as comments; or as JSON."""
    if as_json:
        return json.dumps({"spec": spec.model_dump(mode="json"), "defaults": list(notes)}, indent=2)
    comments = "".join(f"# default: {note}\n" for note in notes)
    return comments + to_toml(document_of(spec)).rstrip("\n")


def without_defaults(spec: RunSpec) -> dict[str, Any]:
    """Return a run's settings without defaults, as plain values that mean the same run, also to `xtoken run`.

    What models, text and machine would decide is kept, and so is that there is no evaluation. Mode and weights are kept
    beside other settings of the loss, because these decide what they are where they are left out; one of `MAY_GO` that
    is decided in the same way is left out. None is the word that a run file has for it, where it has one.

    Args:
        spec: The run.
    """
    document = document_of(spec, exclude_defaults=True)
    complete = document_of(spec)
    for name in FILLED:
        _keep(document, complete, name.split("."))
    if spec.eval is None:
        document["eval"] = NONE
    if document.get("loss") or not _means(document, spec):
        document["loss"] = document.get("loss", {}) | {name: complete["loss"][name] for name in BY_OTHERS}
    for table, left_out in (name.split(".") for name in MAY_GO):
        shorter = {name: value for name, value in document.get(table, {}).items() if name != left_out}
        if table in document and _means(document | {table: shorter}, spec):
            document[table] = shorter
    return document


def _means(document: Mapping[str, Any], spec: RunSpec) -> bool:
    """Return True if a document is that of a run."""
    with suppress(ValidationError):
        return RunSpec.model_validate(document) == spec
    return False


def _keep(document: Any, complete: Any, path: Sequence[str]) -> None:
    """Add a setting of a complete document to a shorter one; of each teacher its own."""
    if isinstance(complete, list):
        for part, whole in zip(document, complete, strict=True):
            _keep(part, whole, path)
    elif isinstance(complete, Mapping) and path[0] in complete:
        key, *rest = path
        if rest and complete[key]:
            _keep(document.setdefault(key, {}), complete[key], rest)
        elif not rest:
            document[key] = complete[key]


def document_of(part: ConfigModel, *, exclude_defaults: bool = False) -> dict[str, Any]:
    """Return settings as plain values that mean the same in a run file.

    None is the word "none" where a setting takes it; elsewhere it is None, which a run file leaves out. An empty list
    or table is left out where that is the default.

    >>> from xtoken_core.config.loss import LossConfig
    >>> document_of(LossConfig(kl_loss_weight_end=None), exclude_defaults=True)
    {'kl_loss_weight_end': 'none'}

    Args:
        part: A whole configuration or a part of it.
        exclude_defaults: Leave out settings at their default.
    """
    document: dict[str, Any] = _written(part, part.model_dump(mode="json", exclude_defaults=exclude_defaults))
    return document


def without_none(document: Any) -> Any:
    """Return plain values without those that are None, which TOML lacks.

    >>> without_none({"name": "a", "output": None, "teacher": [{"gpu": None, "gpus": 1}]})
    {'name': 'a', 'teacher': [{'gpus': 1}]}

    Args:
        document: Settings, or a part of them, as plain values.
    """
    if isinstance(document, Mapping):
        return {key: without_none(item) for key, item in document.items() if item is not None}
    if isinstance(document, (list, tuple)):
        return [without_none(item) for item in document if item is not None]
    return document


def _written(value: Any, plain: Any) -> Any:
    """Return plain values with the word where the value that they were made from has a None that takes it."""
    if isinstance(value, ConfigModel):
        fields = type(value).model_fields
        return {
            name: NONE if item is None and NoneWord in fields[name].metadata else _written(getattr(value, name), item)
            for name, item in plain.items()
            if item not in ([], {}) or fields[name].default not in ((), {})
        }
    if isinstance(value, tuple):
        # An item that is None takes the word: a run file could not leave it out.
        return [NONE if each is None else _written(each, item) for each, item in zip(value, plain, strict=True)]
    return plain
