"""A run's form: from what a browser sends to a specification and back, with every complaint at its field."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

import tomli_w
from pydantic import ValidationError

from services.control.web.fields import TEACHER, Field, field_names, sections, shown
from xtoken_core.config.spec import RunSpec

MOST_FIELDS = 2000
MOST_TEACHERS = 16
NUMBERED = re.compile(rf"{TEACHER}\.(\d+)")
NAMED = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)*")

Errors = dict[str, list[str]]
"""Complaints by the field's name; those under the empty name are about no single field."""


def posted(body: bytes) -> dict[str, str]:
    """What a browser has sent, by name.

    Raises:
        ValueError: It is no form, or has too many fields.
    """
    pairs = parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=MOST_FIELDS)
    return {name: value.replace("\r\n", "\n") for name, value in pairs}


def teachers_in(values: Mapping[str, str]) -> int:
    """How many teachers a form has; one at least."""
    numbers = [int(match[1]) for name in values if (match := NUMBERED.match(name))]
    return min(MOST_TEACHERS, max(numbers, default=0) + 1)


def document_of(values: Mapping[str, str]) -> dict[str, Any]:
    """The run file that a form stands for; fields that are empty or hold their default are left out."""
    document: dict[str, Any] = {}
    for section in sections().values():
        if section.optional and values.get(section.name) != "on":
            continue
        if section.name == TEACHER:
            numbers = range(teachers_in(values))
            document[TEACHER] = [_part(values, section.fields, f"{TEACHER}.{number}") for number in numbers]
            continue
        found = _part(values, section.fields, section.name)
        needed = any(field.required for field in section.fields)
        if found or needed or section.optional:
            _place(document, section.name).update(found)
    return document


def values_of(document: Mapping[str, Any]) -> dict[str, str]:
    """How a form shows a run file, which need not be a valid one."""
    values: dict[str, str] = {}
    teachers = document.get(TEACHER, [{}])
    for section in sections().values():
        if section.name == TEACHER:
            for number, teacher in enumerate(teachers if isinstance(teachers, list) else [teachers]):
                values |= _values(teacher, section.fields, f"{TEACHER}.{number}")
            continue
        part = _look(document, section.name)
        if section.optional:
            values[section.name] = "on" if part is not None else ""
        values |= _values(part or {}, section.fields, section.name)
    return values


def read_toml(text: str) -> tuple[dict[str, Any], Errors]:
    """A run file's text as a document; or why it is none."""
    try:
        return tomllib.loads(text), {}
    except tomllib.TOMLDecodeError as error:
        return {}, {"": [f"This is not TOML: {error}"]}


def to_toml(document: Mapping[str, Any]) -> str:
    """Return a document as the text of a run file; None, which TOML lacks, is left out.

    >>> print(to_toml({"name": "a", "output": None, "train": {"seed": 1}}), end="")
    name = "a"
    <BLANKLINE>
    [train]
    seed = 1
    """
    return tomli_w.dumps(_without_none(document))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value if item is not None]
    return value


def validated(document: Mapping[str, Any]) -> tuple[RunSpec | None, Errors]:
    """The specification; or what is wrong with it, by field."""
    try:
        return RunSpec.model_validate(document), {}
    except ValidationError as error:
        errors: Errors = {}
        for item in error.errors(include_url=False, include_context=False):
            name = ".".join(str(part) for part in item["loc"])
            message = item["msg"].removeprefix("Value error, ")
            if item["type"] == "missing":
                message = "This is needed."
            place(errors, name, message[:1].upper() + message[1:] if item["type"] != "value_error" else message)
        return None, errors


def place(errors: Errors, name: str, message: str) -> None:
    """Put a complaint where its field is: the one it is about, or else the first that it names."""
    if not _is_field(name):
        named = next((_full(name, word) for word in NAMED.findall(message) if _is_field(_full(name, word))), "")
        # Within a tuple the complaint belongs to the whole of it.
        above = name.rpartition(".")[0]
        name = named or (above if _is_field(above) else "" if name in ("", TEACHER) else name)
    errors.setdefault(name, []).append(message)


def _full(part: str, word: str) -> str:
    return word if _is_field(word) else f"{part}.{word}" if part else word


def _is_field(name: str) -> bool:
    return NUMBERED.sub(TEACHER, name) in field_names()


def _part(values: Mapping[str, str], fields: tuple[Field, ...], prefix: str) -> dict[str, Any]:
    found = {}
    for field in fields:
        key = field.name.rpartition(".")[2]
        text = values.get(f"{prefix}.{key}" if prefix else key, "").strip()
        if (text or field.kind == "switch") and text != field.default:
            found[key] = _typed(text, field)
    return found


def _typed(text: str, field: Field) -> Any:
    """A field's text as a run file would hold it; what is no such value stays text, and is refused with its name."""
    if field.kind == "switch":
        return text == "on"
    if field.kind == "paths" and "\n" in text:
        return [line.strip() for line in text.splitlines() if line.strip()]
    if field.kind == "list":
        return [_number(item.strip(), (int, float)) for item in text.split(",") if item.strip()]
    kinds = {"integer": (int,), "number": (int, float)}.get(field.kind, ())
    return _number(text, kinds)


def _number(text: str, kinds: tuple[type, ...]) -> Any:
    for kind in kinds:
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _values(part: Any, fields: tuple[Field, ...], prefix: str) -> dict[str, str]:
    given = part if isinstance(part, Mapping) else {}
    names = ((field, field.name.rpartition(".")[2]) for field in fields)

    def text(field: Field, key: str) -> str:
        if given.get(key, "") is None:
            return "none" if field.default else ""
        return shown(given[key], field.kind) if key in given else field.default

    return {f"{prefix}.{key}" if prefix else key: text(field, key) for field, key in names}


def _place(document: dict[str, Any], name: str) -> dict[str, Any]:
    for key in name.split(".") if name else ():
        document = document.setdefault(key, {})
    return document


def _look(document: Mapping[str, Any], name: str) -> Any:
    found: Any = document
    for key in name.split(".") if name else ():
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
