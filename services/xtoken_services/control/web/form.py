"""Conversion between a submitted form, a run file and a specification, with errors by field."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

import tomli_w
from pydantic_core import ErrorDetails

from xtoken_core.config import document as run_file
from xtoken_core.config.base import NONE
from xtoken_core.config.loss import LossConfig
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError
from xtoken_services.common.run.defaults import FILLED
from xtoken_services.control.api.short_specs import read_document
from xtoken_services.control.isolated.toml_text import parse_toml
from xtoken_services.control.web.fields import TEACHER, Field, field_names, format_value, sections

MAX_FIELDS = 2000
MAX_TEACHERS = 16
EVAL = "eval"
WEIGHT_END = "kl_loss_weight_end"
BY_OTHERS = ("mode", WEIGHT_END, "ce_loss_scale")
"""Settings of the loss whose defaults depend on its other settings."""
WITH_EVAL = ("eval.tasks", "eval.samples")
NUMBERED = re.compile(rf"{TEACHER}\.([0-9]{{1,4}})(?![0-9])")
NAMED = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)*")

Errors = dict[str, list[str]]
"""Messages by field name; those under the empty name belong to no single field."""


def parse_form(body: bytes) -> dict[str, str]:
    """Parse a form-encoded body.

    Raises:
        ValueError: The body is malformed, or has too many fields.
    """
    pairs = parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    return {name: value.replace("\r\n", "\n") for name, value in pairs}


def teachers_in(values: Mapping[str, str]) -> int:
    """Return the number of teachers in a form."""
    numbers = [int(match[1]) for name in values if (match := NUMBERED.match(name))]
    return min(MAX_TEACHERS, max(numbers, default=-1) + 1)


def document_of(values: Mapping[str, str]) -> dict[str, Any]:
    """Convert form values to a run file's document, without fields that are empty or have their default."""
    document: dict[str, Any] = {}
    modes = {values.get("loss.mode", ""), *re.split(r"[,\s]+", values.get("loss.teacher_modes", ""))}
    for section in sections().values():
        if section.optional and values.get(section.name) != "on":
            if section.name == EVAL and not any(values.get(part) == "on" for part in WITH_EVAL):
                document[EVAL] = NONE
            continue
        if section.name == TEACHER:
            if count := teachers_in(values):
                document[TEACHER] = [
                    _part(values, section.fields, f"{TEACHER}.{number}", modes) for number in range(count)
                ]
            continue
        part = _part(values, section.fields, section.name, modes)
        if section.name == "loss" and part:
            part = _mode_and_weight(values) | part
        required = any(field.required for field in section.fields)
        if part or required or (section.optional and section.name != EVAL):
            _subtable(document, section.name).update(part)
    return document


def without_defaults(spec: RunSpec) -> dict[str, Any]:
    """Return a run's settings without defaults, as plain values that mean the same run, also to `xtoken run`.

    What models, text and machine would decide is kept, and so is that there is no evaluation. Mode and weights are kept
    beside other settings of the loss, because these decide what they are where they are left out; a weight at the end
    that they decide in the same way is left out. None is the word that
    a run file has for it, where it has one.

    Args:
        spec: The run.
    """
    document = run_file.document_of(spec, exclude_defaults=True)
    complete = run_file.document_of(spec)
    for name in FILLED:
        _keep(document, complete, name.split("."))
    if spec.eval is None:
        document[EVAL] = NONE
    if document.get("loss"):
        document["loss"] |= {name: complete["loss"][name] for name in BY_OTHERS}
        left_out = {name: value for name, value in document["loss"].items() if name != WEIGHT_END}
        if LossConfig.model_validate(left_out).kl_loss_weight_end == spec.loss.kl_loss_weight_end:
            document["loss"] = left_out
    return document


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


def values_of(document: Mapping[str, Any]) -> dict[str, str]:
    """Convert a run file's document, which may be invalid, to form values."""
    values: dict[str, str] = {}
    teachers = document.get(TEACHER, [])
    for section in sections().values():
        if section.name == TEACHER:
            for number, teacher in enumerate(teachers if isinstance(teachers, list) else [teachers]):
                values |= _values(teacher, section.fields, f"{TEACHER}.{number}")
            continue
        part = _lookup(document, section.name)
        if section.optional:
            left_out = section.name == EVAL and EVAL not in document
            values[section.name] = "on" if left_out or (part is not None and part != NONE) else ""
        values |= _values(part or {}, section.fields, section.name)
    return values


def read_toml(text: str) -> tuple[dict[str, Any], Errors]:
    """Parse the text of a run file; return the document, or the errors."""
    try:
        return parse_toml(text), {}
    except ConfigError as error:
        return {}, {"": [str(error)]}


def to_toml(document: Mapping[str, Any]) -> str:
    """Return a document as the text of a run file; None, which TOML lacks, is left out.

    >>> print(to_toml({"name": "a", "output": None, "train": {"seed": 1}}), end="")
    name = "a"
    <BLANKLINE>
    [train]
    seed = 1
    """
    return tomli_w.dumps(run_file.without_none(document))


def validated(document: Mapping[str, Any]) -> tuple[RunSpec | None, Errors]:
    """Validate a document; return the specification, unless something is left out or wrong, and the errors by field."""
    spec, wrong = read_document(document)
    return spec, errors_of(wrong)


def errors_of(wrong: Sequence[ErrorDetails]) -> Errors:
    """Return errors of a specification by field."""
    errors: Errors = {}
    for item in wrong:
        name = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "missing":
            message = "Required."
        add_error(errors, name, message[:1].upper() + message[1:] if item["type"] != "value_error" else message)
    return errors


def add_error(errors: Errors, name: str, message: str) -> None:
    """Add an error to its field; an error of a section goes to the first field that its message names."""
    if not _is_field(name):
        named = next((_full(name, word) for word in NAMED.findall(message) if _is_field(_full(name, word))), "")
        # An error in an item of a tuple belongs to the field of the tuple.
        above = name.rpartition(".")[0]
        name = named or (above if _is_field(above) else "" if name in ("", TEACHER) else name)
    errors.setdefault(name, []).append(message)


def _full(part: str, word: str) -> str:
    return word if _is_field(word) else f"{part}.{word}" if part else word


def _is_field(name: str) -> bool:
    return NUMBERED.sub(TEACHER, name) in field_names()


def _part(values: Mapping[str, str], fields: tuple[Field, ...], prefix: str, modes: set[str]) -> dict[str, Any]:
    part = {}
    for field in fields:
        key = field.key
        text = values.get(f"{prefix}.{key}" if prefix else key, "").strip()
        if not text and field.modes and not modes & {*field.modes}:
            continue  # a switch that the page does not send, because its mode is not chosen
        if (text or field.kind == "switch") and text != field.default:
            part[key] = _typed(text, field)
    return part


def _mode_and_weight(values: Mapping[str, str]) -> dict[str, Any]:
    """Return the loss's mode and weight where given, from which other defaults of the loss follow."""
    mode, weight = (values.get(f"loss.{key}", "").strip() for key in ("mode", "ce_loss_scale"))
    return ({"mode": mode} if mode else {}) | ({"ce_loss_scale": _number(weight, (int, float))} if weight else {})


def _typed(text: str, field: Field) -> Any:
    """Convert a field's text to its type; invalid text is kept, so that validation reports it with the field's name."""
    if field.kind == "switch":
        return text == "on"
    if field.kind == "json":
        return _table(text)
    if field.kind == "paths" and "\n" in text:
        return [line.strip() for line in text.splitlines() if line.strip()]
    if field.kind == "list":
        return [_number(item.strip(), (int, float)) for item in text.split(",") if item.strip()]
    kinds = {"integer": (int,), "number": (int, float)}.get(field.kind, ())
    return _number(text, kinds)


def _table(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _number(text: str, kinds: tuple[type, ...]) -> Any:
    for kind in kinds:
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _values(part: Any, fields: tuple[Field, ...], prefix: str) -> dict[str, str]:
    values = part if isinstance(part, Mapping) else {}
    names = ((field, field.key) for field in fields)

    def text(field: Field, key: str) -> str:
        if values.get(key, "") is None:
            return NONE if field.default else ""
        return format_value(values[key], field.kind) if key in values else field.default

    return {f"{prefix}.{key}" if prefix else key: text(field, key) for field, key in names}


def _subtable(document: dict[str, Any], name: str) -> dict[str, Any]:
    for key in name.split(".") if name else ():
        document = document.setdefault(key, {})
    return document


def _lookup(document: Mapping[str, Any], name: str) -> Any:
    value: Any = document
    for key in name.split(".") if name else ():
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
