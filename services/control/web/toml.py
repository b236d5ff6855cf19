"""Run files: a specification's values as TOML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def to_toml(document: Mapping[str, Any]) -> str:
    """A document of plain values as TOML; None is left out, which TOML cannot say.

    >>> print(to_toml({"name": "a", "train": {"betas": [0.9, 0.95], "lora": {}}, "teacher": [{"weight": 1.0}]}))
    name = "a"
    <BLANKLINE>
    [train]
    betas = [0.9, 0.95]
    <BLANKLINE>
    [train.lora]
    <BLANKLINE>
    [[teacher]]
    weight = 1.0
    <BLANKLINE>
    """
    return "\n".join(_lines(document, ())) + "\n"


def _lines(table: Mapping[str, Any], place: tuple[str, ...]) -> Iterator[str]:
    below = []
    for key, value in table.items():
        if isinstance(value, Mapping) or _is_tables(value):
            below.append((key, value))
        elif value is not None:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in below:
        name = ".".join(map(_key, (*place, key)))
        for item in value if _is_tables(value) else (value,):
            yield ""
            yield f"[[{name}]]" if _is_tables(value) else f"[{name}]"
            yield from _lines(item, (*place, key))


def _is_tables(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value if item is not None) + "]"
    return repr(value) if isinstance(value, (int, float)) else _text(str(value))


def _text(text: str) -> str:
    # Not ASCII only: TOML has no surrogate pairs. JSON leaves DEL as it is, TOML does not take it.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")
