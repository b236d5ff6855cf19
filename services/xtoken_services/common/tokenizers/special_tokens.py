"""Pairs of special tokens as people write them: `STUDENT=TEACHER`."""

from __future__ import annotations

from collections.abc import Iterable

from xtoken_core.errors import ConfigError


def parse_special_tokens(texts: Iterable[str], name: str) -> dict[str, str]:
    """Return the teacher's token by the student's; the names are divided at the last `=`.

    Args:
        texts: Each `STUDENT=TEACHER`, or `STUDENT=` for a token without a partner.
        name: Name of the option or field, for the message.

    Raises:
        ConfigError: One has no `=`, or nothing before it.
    """
    pairs = {}
    for text in texts:
        student, equals, teacher = text.rpartition("=")
        if not equals or not student:
            raise ConfigError(f"{name} {text}: it takes STUDENT=TEACHER, or STUDENT= for no partner")
        pairs[student] = teacher
    return pairs
