"""Both tokenizers' tables as arrays, numbered alike, in the spelling in which they are compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xtoken_core.alignment.tables import TEXT, Pool, TokenTable, spelling_pool

FLAGGED = np.int32(1 << 24)
"""Set in `Side.info` for tokens that need more care than their length."""
BOTH_ROLES = 3
"""The role of a token that is both bos and eos."""


@dataclass(frozen=True)
class Side:
    """One tokenizer's table as arrays, in the spelling that both sides are compared in.

    Attributes:
        table: What the tokenizer's tokens spell.
        info: `[V]` int32: the length of the compared spelling; specials and unknown tokens have bit 24 set.
        pool: The compared spellings.
        canonical: `[V]` int32: equal for tokens of either side with the same compared spelling.
        canonical_led: `[V]` int32: the same for the spelling without its leading space.
        role: `[V]` int32: the role of a special, numbered alike on both sides; 1 = bos, 2 = eos, 3 = either.
        leading_space: `[V]` bool: the compared spelling begins with a space.
        two_spaces: `[V]` bool: it begins with two.
    """

    table: TokenTable
    info: np.ndarray
    pool: Pool
    canonical: np.ndarray
    canonical_led: np.ndarray
    role: np.ndarray
    leading_space: np.ndarray
    two_spaces: np.ndarray


def build_sides(
    student: TokenTable, teacher: TokenTable, student_pieces: list[bytes], teacher_pieces: list[bytes]
) -> tuple[Side, Side]:
    """The arrays of both sides, with spellings and roles numbered alike.

    Args:
        student: The student's tokens.
        teacher: The teacher's.
        student_pieces: By id, what is compared: the table's pieces, or what normalising makes of them.
        teacher_pieces: Likewise.
    """
    spellings: dict[bytes, int] = {}
    roles = {"pad": 0, "bos": 1, "eos": 2, "bos|eos": BOTH_ROLES}
    sides = []
    for table, pieces in ((student, student_pieces), (teacher, teacher_pieces)):
        pool = spelling_pool(pieces, table.literals)
        numbers = [spellings.setdefault(piece, len(spellings)) for piece in pieces]
        led = numbers
        if table.prefix != "none":
            led = [spellings.setdefault(piece.removeprefix(b" "), len(spellings)) for piece in pieces]
        role = np.zeros(len(pieces), dtype=np.int32)
        for index, name in table.roles.items():
            role[index] = roles.setdefault(name, len(roles))
        sides.append(
            Side(
                table=table,
                info=np.where(table.kinds == TEXT, pool.lengths, FLAGGED).astype(np.int32),
                pool=pool,
                canonical=np.array(numbers, dtype=np.int32),
                canonical_led=np.array(led, dtype=np.int32),
                role=role,
                leading_space=np.fromiter((p[:1] == b" " for p in pieces), dtype=bool, count=len(pieces)),
                two_spaces=np.fromiter((p[:2] == b"  " for p in pieces), dtype=bool, count=len(pieces)),
            )
        )
    return sides[0], sides[1]
