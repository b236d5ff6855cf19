"""Both tokenizers' tables as arrays, numbered alike, in the spelling in which they are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from xtoken_core.alignment.hashing import prefix_hashes
from xtoken_core.alignment.tables import TEXT, UNKNOWN, Pool, TokenTable, spelling_pool

ABSENT = 3
"""The kind of a place of a batch that holds no token (padding, a prompt); beside those of `tables`."""
_WHITESPACE = b" \t\n\r\v\f"
BOS, EOS, BOS_OR_EOS, UNKNOWN_ROLE = 1, 2, -1, -2
"""Roles; 0 = none, numbers from 3 stand for the other specials' own strings, `UNKNOWN_ROLE` for unknown text."""


@dataclass(frozen=True)
class Side:
    """One tokenizer's table as arrays over its `V` tokens and, at index `V`, the absent token, which spells nothing.

    Attributes:
        table: What the tokenizer's tokens spell.
        pool: The spellings in which both sides are compared.
        role: `[V + 1]` int64: the role of a token that is no text, numbered alike on both sides.
    """

    table: TokenTable
    pool: Pool
    role: np.ndarray

    @property
    def absent(self) -> int:
        """The id of a place without a token."""
        return len(self.table)


@dataclass(frozen=True)
class TokenArrays:
    """Both sides, and arrays over all `V` tokens of the student, its absent token, the teacher's tokens, and its own.

    Attributes:
        student: The student's arrays.
        teacher: The teacher's.
        kinds: `[V]` uint8: the tables' kinds, and `ABSENT`.
        roles: `[V]` int64: those of the sides.
        lengths: `[V]` unsigned, as narrow as can be: bytes of the compared spelling.
        hashes: `[V]` uint64: hash of the compared spelling, 0 for what spells nothing.
        prefix_hashes: uint64: at every byte of both pools, the hash of its token up to it.
        ends: `[V]` int64: where a token's spelling ends in `prefix_hashes`.
        leading_spaces: `[V]` uint8: with how many spaces, two at most, the compared spelling begins.
    """

    student: Side
    teacher: Side
    kinds: np.ndarray
    roles: np.ndarray
    lengths: np.ndarray
    hashes: np.ndarray
    prefix_hashes: np.ndarray
    ends: np.ndarray
    leading_spaces: np.ndarray

    @property
    def offset(self) -> int:
        """Offset added to a teacher's id."""
        return self.student.absent + 1

    @cached_property
    def tables(self) -> tuple[TokenTable, TokenTable]:
        """Token tables of both sides."""
        return self.student.table, self.teacher.table

    @cached_property
    def prefixes(self) -> tuple[str, str]:
        """Rules by which the two tokenizers put a space before a text."""
        return self.student.table.prefix, self.teacher.table.prefix

    @cached_property
    def absent(self) -> tuple[int, int]:
        """The absent tokens of both sides."""
        return self.student.absent, self.offset + self.teacher.absent

    @cached_property
    def longer(self) -> int:
        """A length that no token has."""
        return int(np.iinfo(self.lengths.dtype).max)


def is_ended(side: Side, ids: np.ndarray) -> np.ndarray:
    """Return `[B]` bool, True for rows that are not truncated: the last token of `[B, T]` ids closes them."""
    if not ids.size:
        return np.zeros(len(ids), dtype=bool)
    last = ids.shape[1] - 1 - (ids != side.absent)[:, ::-1].argmax(axis=1)
    return np.isin(side.role[ids[np.arange(len(ids)), last]], (EOS, BOS_OR_EOS))


def build_token_arrays(
    student: TokenTable, teacher: TokenTable, student_pieces: list[bytes], teacher_pieces: list[bytes]
) -> TokenArrays:
    """Build the arrays of both sides, with spellings and roles numbered alike.

    Args:
        student: The student's tokens.
        teacher: The teacher's.
        student_pieces: By id, what is compared: the table's pieces, or what normalising makes of them.
        teacher_pieces: Likewise.
    """
    # Padding that is attended has no role: it pairs with nothing.
    numbers = {"pad": 0, "bos": BOS, "eos": EOS, "bos|eos": BOS_OR_EOS}
    sides = []
    for table, compared in ((student, student_pieces), (teacher, teacher_pieces)):
        role = np.zeros(len(table) + 1, dtype=np.int64)  # [V + 1]
        role[:-1][table.kinds == UNKNOWN] = UNKNOWN_ROLE
        # A token of which nothing but whitespace is left out may lie inside of a chunk: its row needs a closer look.
        left_out = (n for n, piece in enumerate(table.pieces) if not compared[n] and piece.strip())
        role[[n for n in left_out if table.kinds[n] == TEXT]] = UNKNOWN_ROLE
        for index, name in table.roles.items():
            # One dictionary for both sides: a special's own string has the same number on either.
            role[index] = numbers.setdefault(name, len(numbers))
        sides.append(Side(table, spelling_pool([*compared, b""], table.literals), role))
    student_side, teacher_side = sides
    # The empty piece behind each side's tokens is its absent token.
    pieces = [*student_pieces, b"", *teacher_pieces, b""]
    joined = spelling_pool(pieces, {})
    hashes = prefix_hashes(joined.data[: joined.ends[-1]], joined.lengths)  # one for every byte of the pieces
    longest = int(joined.lengths.max())
    return TokenArrays(
        student=student_side,
        teacher=teacher_side,
        kinds=np.concatenate([part for side in sides for part in (side.table.kinds, np.array([ABSENT], np.uint8))]),
        roles=np.concatenate([student_side.role, teacher_side.role]),
        # One value more than any length, for the ends of rows; narrow, since `_opened` scatters one per byte of text.
        lengths=joined.lengths.astype(np.min_scalar_type(longest + 1)),
        # The byte before an empty piece's end belongs to another piece, or (index -1) to the 0 appended here.
        hashes=np.where(joined.lengths > 0, np.append(hashes, np.uint64(0))[joined.ends - 1], np.uint64(0)),
        prefix_hashes=hashes,
        ends=joined.ends,
        leading_spaces=np.fromiter(
            ((p[:1] == b" ") + (p[:2] == b"  ") for p in pieces), dtype=np.uint8, count=len(pieces)
        ),
    )


def compared_pieces(
    table: TokenTable, normalizers: Sequence[Callable[[str], str] | None], drop_whitespace: bool
) -> list[bytes]:
    """Return by id the bytes in which both sides are compared.

    Args:
        table: One side's tokens.
        normalizers: What either tokenizer does to characters; None: nothing.
        drop_whitespace: Whether one of them spells no spaces.
    """
    pieces = list(table.pieces)
    for normalizer in dict.fromkeys(each for each in normalizers if each is not None):
        pieces = [normalizer(piece.decode()).encode() if is_text(piece) else piece for piece in pieces]
    return [piece.translate(None, _WHITESPACE) for piece in pieces] if drop_whitespace else pieces


def is_text(data: bytes) -> bool:
    """Return True for UTF-8, without a part of a character."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
