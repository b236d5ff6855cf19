"""Prompts: the part of a record that the student completes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def prompt_of(value: Mapping[str, Any], characters: int | None) -> dict[str, Any] | None:
    """Return the prompt of a record as `text` or `messages`; None if there is nothing to complete.

    Args:
        value: A record's value: `text`, `prompt` and `completion`, or `messages`.
        characters: Maximum of characters of a plain text; None: all of it.
    """
    if "text" in value:
        return {"text": cut_at_word(str(value["text"]), characters)}
    if "completion" in value:
        return {"text": value["prompt"]}
    messages = list(value["messages"])
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return {"messages": messages} if messages else None


def cut_at_word(text: str, characters: int | None) -> str:
    """Return the beginning of a text up to the end of its last whole word.

    >>> cut_at_word("one two three", 9), cut_at_word("one two three", 7), cut_at_word("one", 2)
    ('one two', 'one two', 'on')
    """
    if characters is None or len(text) <= characters:
        return text
    head = text[:characters]
    if not text[characters].isspace():
        head = re.sub(r"\s+\S*$", "", head) or head
    return head.rstrip() or head
