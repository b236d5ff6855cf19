"""Which leading spaces a tokenizer put there itself (SentencePiece's dummy prefix), and which were in the text."""

from __future__ import annotations

import numpy as np

from xtoken_core.alignment.sides import Side
from xtoken_core.alignment.tables import TEXT

_HEAD = 8
"""Where a row's first text token is looked for first."""


def own_spaces(
    student: Side,
    teacher: Side,
    student_ids: np.ndarray,
    teacher_ids: np.ndarray,
    student_mask: np.ndarray | None,
    teacher_mask: np.ndarray | None,
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """`[B, T]` bool per side: tokens whose leading space is the tokenizer's own; None if it never adds one.

    Those are the first text token of a row and of every separately tokenized stretch (one after a gap in the mask)
    and, for some tokenizers, those after a special. A tokenizer that adds a space only where it is missing, or whose
    row begins behind a gap, has added none to a row that begins with a space on the other side too.
    """
    habits = student.table.prefix, teacher.table.prefix
    if habits == ("none", "none"):
        return None, None
    s, t = (student, student_ids, student_mask), (teacher, teacher_ids, teacher_mask)
    result: list[np.ndarray | None] = []
    for (side, ids, mask), other in ((s, t), (t, s)):
        if side.table.prefix == "none":
            result.append(None)
            continue
        led = _candidates(side, ids, mask)
        first = _first_text(side, ids, mask)
        unsure = np.full(len(ids), side.table.prefix == "missing" and other[0].table.prefix != "missing")
        if mask is not None:
            rows = np.flatnonzero(first > 0)
            unsure[rows] |= ~mask[rows, first[rows] - 1]
        rows = np.flatnonzero(unsure & _begins_with_space(*other)) if unsure.any() else np.flatnonzero(unsure)
        led[rows, first[rows]] = False
        result.append(led)
    return result[0], result[1]


def _candidates(side: Side, ids: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    if mask is None and not side.table.prefix_after_special:
        begins = np.zeros(ids.shape, dtype=bool)
        rows, first = np.arange(len(ids)), _first_text(side, ids, mask)
        if ids.size:
            begins[rows, first] = side.leading_space[ids[rows, first]]
        return begins
    there = np.ones(ids.shape, dtype=bool) if mask is None else mask
    text = there & (side.table.kinds[ids] == TEXT)
    before = np.zeros(ids.shape, dtype=bool)
    before[:, 1:] = text[:, :-1] if side.table.prefix_after_special else there[:, :-1]
    begins = text & ~before
    if ids.size:
        rows = np.flatnonzero(text.any(axis=1))
        begins[rows, text[rows].argmax(axis=1)] = True
    led: np.ndarray = begins & side.leading_space[ids]
    return led


def _first_text(side: Side, ids: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """`[B]`: index of each row's first text token, 0 if it has none."""
    if not ids.size:
        return np.zeros(len(ids), dtype=np.int64)
    head = side.table.kinds[ids[:, :_HEAD]] == TEXT
    head = head if mask is None else head & mask[:, :_HEAD]
    if not head.any(axis=1).all():
        head = side.table.kinds[ids] == TEXT
        head = head if mask is None else head & mask
    first: np.ndarray = head.argmax(axis=1)
    return first


def _begins_with_space(side: Side, ids: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """`[B]` bool: the text itself begins with a space, the one that the tokenizer always adds not counted."""
    if not ids.size:
        return np.zeros(len(ids), dtype=bool)
    rows = np.arange(len(ids))
    first = _first_text(side, ids, mask)
    token = ids[rows, first]
    after = ids[rows, np.minimum(first + 1, ids.shape[1] - 1)]
    begins: np.ndarray = side.leading_space[token]
    if side.table.prefix != "none":
        begins = side.two_spaces[token] | ((side.pool.lengths[token] == 1) & side.leading_space[after])
    return begins
