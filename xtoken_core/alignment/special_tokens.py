"""Pairs of special tokens that are set by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from xtoken_core.alignment.tables import TokenTable
from xtoken_core.errors import ConfigError

SpecialTokens = Mapping[str, str]
"""The teacher's special token for a student's, by their names; the empty name pairs it with none."""


def special_token_ids(student: TokenTable, teacher: TokenTable, pairs: SpecialTokens) -> dict[int, int | None]:
    """Return the pairs as ids; None for a student's token that is paired with none.

    Raises:
        ConfigError: A name is no special token of its side, begins or ends a text there, or is named twice.
    """
    ids = {
        _id_of(student, name, "student"): _id_of(teacher, partner, "teacher") if partner else None
        for name, partner in pairs.items()
    }
    named = [partner for partner in ids.values() if partner is not None]
    if len(set(named)) < len(named):
        twice = next(partner for partner in pairs.values() if partner and list(pairs.values()).count(partner) > 1)
        raise ConfigError(f"special_tokens: {twice!r} of the teacher is named twice: pair it with one token")
    return ids


def with_special_tokens(
    student: TokenTable, teacher: TokenTable, pairs: SpecialTokens
) -> tuple[TokenTable, TokenTable]:
    """Return both tables with the roles that the pairs give; a named token has no other partner.

    Raises:
        ConfigError: As `special_token_ids`.
    """
    if not pairs:
        return student, teacher
    student_roles, teacher_roles = dict(student.roles), dict(teacher.roles)
    for index, partner in special_token_ids(student, teacher, pairs).items():
        role = f"special_tokens {index}"
        student_roles[index] = role
        if partner is not None:
            teacher_roles[partner] = role
    return replace(student, roles=student_roles), replace(teacher, roles=teacher_roles)


def _id_of(table: TokenTable, name: str, side: str) -> int:
    index = next((index for index, literal in table.literals.items() if literal == name.encode()), None)
    if index is None:
        raise ConfigError(f"special_tokens: {name!r} is no special token of the {side}'s tokenizer")
    if {"bos", "eos"} & set(table.roles[index].split("|")):
        raise ConfigError(
            f"special_tokens: {name!r} begins or ends a text of the {side}: such tokens pair by themselves; leave it "
            "out"
        )
    return index
