"""Settings of a run file by name, from the JSON schema of their models, and the settings that errors are about."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from pydantic_core import ErrorDetails

from xtoken_core.config.spec import RunSpec
from xtoken_core.config.validation_errors import message_of

NUMBER = re.compile(r"\.[0-9]+(?=\.|$)")
NAMED = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)*")

Errors = dict[str, list[str]]
"""Messages by the name of their setting; those under the empty name belong to none."""


@cache
def settings() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of every setting by its dotted name; names in lists, as of a teacher, have no number."""
    schema = RunSpec.model_json_schema()
    by_name: dict[str, dict[str, Any]] = {}

    def collect(model: dict[str, Any], prefix: str) -> None:
        for key, part in model["properties"].items():
            arms = part.get("anyOf", [part])  # `Section | None` has an arm for each
            models = [ref for arm in arms if (ref := arm.get("$ref") or arm.get("items", {}).get("$ref"))]
            if models:
                collect(schema["$defs"][models[0].rpartition("/")[2]], f"{prefix}{key}.")
            else:
                by_name[f"{prefix}{key}"] = part

    collect(schema, "")
    return by_name


def setting_of(name: str, message: str) -> str:
    """Return the setting that an error is about: of an error of a section, the first one that its message names.

    Args:
        name: The place that the error has: a setting, an item of it, a section, an unknown field or nothing.
        message: Its text.
    """
    plain = NUMBER.sub("", name)
    if not plain or any(known.startswith(f"{plain}.") for known in settings()):
        words = (word if "." in word else f"{name}.{word}" for word in NAMED.findall(message))
        return next((word for word in words if NUMBER.sub("", word) in settings()), name)
    parts = name.split(".")
    # pydantic names what is below a setting, too: the number of an item, or the arm of a union.
    above = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((setting for setting in above if NUMBER.sub("", setting) in settings()), name)


def errors_of(wrong: Sequence[ErrorDetails]) -> Errors:
    """Return pydantic's errors by setting."""
    errors: Errors = {}
    for item in wrong:
        add_error(errors, ".".join(map(str, item["loc"])), message_of(item, RunSpec))
    return errors


def add_error(errors: Errors, name: str, message: str) -> None:
    """Add a message under the setting that it is about, once."""
    texts = errors.setdefault(setting_of(name, message), [])
    if message not in texts:
        texts.append(message)
