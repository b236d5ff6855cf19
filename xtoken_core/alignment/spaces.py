"""Which leading spaces a tokenizer put there itself (SentencePiece's dummy prefix), and which were in the text."""

from __future__ import annotations

import numpy as np

from xtoken_core.alignment.sides import Sides
from xtoken_core.alignment.tables import TEXT, TokenTable

_HEAD = 8
"""Where a row's first text token is looked for first."""


def own_spaces(sides: Sides, student_ids: np.ndarray, teacher_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Flat indices, per side, of tokens whose leading space is the tokenizer's own.

    Those are the first text token of a row and of every separately tokenized stretch (one after absent tokens)
    and, for some tokenizers, those after a special. A tokenizer that adds a space only where it is missing, or whose
    row begins behind a gap, has added none to a row that begins with a space on the other side too.

    Args:
        sides: Both sides' arrays.
        student_ids: `[B, T_s]` int64, contiguous; T_s > 0.
        teacher_ids: `[B, T_t]` int64, the sides' offset added; T_t > 0.
    """
    s, t = (sides.student.table, student_ids), (sides.teacher.table, teacher_ids)
    none = np.zeros(0, dtype=np.int64)
    if s[0].prefix == t[0].prefix == "none":
        return none, none
    firsts = _first_text(sides, student_ids), _first_text(sides, teacher_ids)
    return (
        none if s[0].prefix == "none" else _own_spaces(sides, s, t, *firsts, sides.student.absent),
        none if t[0].prefix == "none" else _own_spaces(sides, t, s, *firsts[::-1], sides.offset + sides.teacher.absent),
    )


def _own_spaces(
    sides: Sides,
    side: tuple[TokenTable, np.ndarray],
    other: tuple[TokenTable, np.ndarray],
    first: np.ndarray,
    other_first: np.ndarray,
    absent: int,
) -> np.ndarray:
    table, ids = side
    unsure = (first % ids.shape[1] > 0) & (ids.take(first - 1, mode="wrap") == absent)
    if table.prefix == "missing" and other[0].prefix != "missing":
        unsure[:] = True
    if unsure.any():
        unsure &= _begins_with_space(sides, *other, other_first)
    led: np.ndarray = first[~unsure]
    if len(after := _after_breaks(sides, table, ids, absent)):
        led = np.concatenate([led, after[~np.isin(after, first)]])
    led = led[sides.leading_spaces.take(ids.take(led)) > 0]
    return led


def _after_breaks(sides: Sides, table: TokenTable, ids: np.ndarray, absent: int) -> np.ndarray:
    """Flat indices of the text that follows a gap of its row or, for some tokenizers, any token that is no text."""
    breaks = sides.kinds.take(ids) != TEXT if table.prefix_after_special else ids == absent
    after: np.ndarray = breaks.ravel().nonzero()[0] + 1
    after = after[after % ids.shape[1] != 0]
    after = after[sides.kinds.take(ids.take(after)) == TEXT]
    return after


def _first_text(sides: Sides, ids: np.ndarray) -> np.ndarray:
    """`[B]`: flat index of each row's first text token, that of its first token if it has none."""
    head = sides.kinds.take(ids[:, :_HEAD]) == TEXT
    if not head.any(axis=1).all():
        head = sides.kinds.take(ids) == TEXT
    first: np.ndarray = head.argmax(axis=1)
    first += np.arange(0, ids.size, ids.shape[1])
    return first


def _begins_with_space(sides: Sides, table: TokenTable, ids: np.ndarray, first: np.ndarray) -> np.ndarray:
    """`[B]` bool: the text itself begins with a space, the one that the tokenizer always adds not counted."""
    token = ids.take(first)
    spaces = sides.leading_spaces.take(token)
    if table.prefix == "none":
        return spaces > 0
    after = ids.take(np.where((first + 1) % ids.shape[1], first + 1, first))
    begins: np.ndarray = (spaces > 1) | ((sides.lengths.take(token) == 1) & (sides.leading_spaces.take(after) > 0))
    return begins
