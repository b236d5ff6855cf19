"""Both tokenizers' tables as arrays, numbered alike, in the spelling in which they are compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xtoken_core.alignment.tables import TEXT, Pool, TokenTable, spelling_pool, spread

FLAGGED = 1 << 24
"""Set in `Side.info` for tokens that need more care than their length."""
BOTH_ROLES = 3
"""The role of a token that is both bos and eos."""


@dataclass(frozen=True)
class Side:
    """One tokenizer's table as arrays, in the spelling that both sides are compared in.

    Attributes:
        table: What the tokenizer's tokens spell.
        info: `[V]` int64: the length of the compared spelling; specials and unknown tokens have bit 24 set.
        pool: The compared spellings.
        hashes: `[V]` uint64: hash of the compared spelling, 0 for what spells nothing.
        led_hashes: `[V]` uint64: hash of the spelling without its first byte.
        role: `[V]` int64: the role of a special, numbered alike on both sides; 1 = bos, 2 = eos, 3 = either.
        leading_space: `[V]` bool: the compared spelling begins with a space.
        two_spaces: `[V]` bool: it begins with two.
    """

    table: TokenTable
    info: np.ndarray
    pool: Pool
    hashes: np.ndarray
    led_hashes: np.ndarray
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
    roles = {"pad": 0, "bos": 1, "eos": 2, "bos|eos": BOTH_ROLES}
    sides = []
    for table, pieces in ((student, student_pieces), (teacher, teacher_pieces)):
        pool = spelling_pool(pieces, table.literals)
        role = np.zeros(len(pieces), dtype=np.int64)
        for index, name in table.roles.items():
            role[index] = roles.setdefault(name, len(roles))
        sides.append(
            Side(
                table=table,
                info=np.where(table.kinds == TEXT, pool.lengths, FLAGGED),
                pool=pool,
                hashes=_hashes(pool, skip=0),
                led_hashes=_hashes(pool, skip=1),
                role=role,
                leading_space=np.fromiter((p[:1] == b" " for p in pieces), dtype=bool, count=len(pieces)),
                two_spaces=np.fromiter((p[:2] == b"  " for p in pieces), dtype=bool, count=len(pieces)),
            )
        )
    return sides[0], sides[1]


_RANDOM = np.random.default_rng(0x70C3)
_BYTE_CODES = _RANDOM.integers(0, 2**64, size=256, dtype=np.uint64)
_BASE = int(_RANDOM.integers(0, 2**64, dtype=np.uint64)) | 1
_POWERS = [np.ones(1, dtype=np.uint64)]


def hash_powers(count: int) -> np.ndarray:
    """`[n]` uint64, n at least `count`: powers of the hash's base, modulo 2^64.

    The hash of bytes b_0 b_1 … is the sum of `code[b_i] * base^i`: that of a text is the sum of its tokens' hashes,
    each times the power of the token's place. Different texts agree in it by chance once in about 2^64.
    """
    if len(_POWERS[0]) < count:
        factors = np.full(max(count, 2 * len(_POWERS[0])), _BASE, dtype=np.uint64)
        factors[0] = 1
        _POWERS[0] = np.cumprod(factors)
    return _POWERS[0]


def _hashes(pool: Pool, *, skip: int) -> np.ndarray:
    """`[V]` uint64: the hash of every token's spelling without its first `skip` bytes."""
    lengths = np.maximum(pool.lengths - skip, 0)
    places = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    codes = _BYTE_CODES[pool.data[spread(pool.ends, lengths)]]
    codes *= hash_powers(int(lengths.max(initial=0)) + 1)[places]
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(codes)])
    ends = np.cumsum(lengths)
    hashes: np.ndarray = sums[ends] - sums[ends - lengths]
    return hashes
