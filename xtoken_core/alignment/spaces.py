"""Which leading spaces a tokenizer put there itself (SentencePiece's dummy prefix), and which were in the text."""

from __future__ import annotations

import numpy as np

from xtoken_core.alignment.rows import Rows
from xtoken_core.alignment.sides import Sides
from xtoken_core.alignment.tables import TEXT


def own_spaces(sides: Sides, ids: np.ndarray, rows: Rows, silent: np.ndarray) -> np.ndarray:
    """Indices of tokens whose leading space is the tokenizer's own.

    Those are the first text token of a row and of every separately tokenized stretch (one after absent tokens)
    and, for some tokenizers, those after a special. A tokenizer that adds a space only where it is missing, or whose
    row begins behind a gap, has added none to a row that begins with a space on the other side too.

    Args:
        sides: Both sides' arrays.
        ids: `[n]` int64: all rows of the student, then all of the teacher with the sides' offset added.
        rows: Where the rows lie; none is empty.
        silent: Indices of the tokens that spell nothing, in order; absent tokens and specials are among them.
    """
    prefixes = sides.student.table.prefix, sides.teacher.table.prefix
    if prefixes[0] == prefixes[1] == "none":
        return np.zeros(0, dtype=np.int64)
    first, absent = _first_text(sides, ids, rows), sides.absent
    quiet, split = ids.take(silent), int(silent.searchsorted(rows.split))
    led = []
    for side, prefix in enumerate(prefixes):
        if prefix == "none":
            continue
        part = slice(split) if side == 0 else slice(split, None)
        gaps = quiet[part] == absent[side]
        own = kept = first[rows.of(side)]
        if prefix == "missing" and prefixes[1 - side] != "missing":
            kept = own[~_begins_with_space(sides, ids, rows, first, 1 - side)]
        elif gaps.any():
            unsure = (own > rows.first[rows.of(side)]) & (ids.take(own - 1, mode="wrap") == absent[side])
            kept = own[~(unsure & _begins_with_space(sides, ids, rows, first, 1 - side))]
        breaks = sides.kinds.take(quiet[part]) != TEXT if sides.tables[side].prefix_after_special else gaps
        after = silent[part][breaks] + 1
        if len(after):
            led.append(_text_after(sides, ids, rows, side, after, own))
        led.append(kept)
    found: np.ndarray = led[0] if len(led) == 1 else np.concatenate(led)
    spaced: np.ndarray = found[sides.leading_spaces.take(ids.take(found)) > 0]
    return spaced


def _text_after(
    sides: Sides, ids: np.ndarray, rows: Rows, side: int, after: np.ndarray, first: np.ndarray
) -> np.ndarray:
    """Of the tokens after breaks: those of text in the row of the break that are not the first text of it."""
    row = (after - 1 - side * rows.split) // rows.widths[side]
    inside = (after <= rows.last[rows.of(side)].take(row)) & (first.take(row) != after)
    after = after[inside]
    found: np.ndarray = after[sides.kinds.take(ids.take(after)) == TEXT]
    return found


def _first_text(sides: Sides, ids: np.ndarray, rows: Rows) -> np.ndarray:
    """`[2B]`: index of each row's first text token, that of its first token if it has none."""
    head = sides.kinds.take(ids.take(rows.head)) == TEXT
    first: np.ndarray = rows.first + head.argmax(axis=1)
    for row in (sides.kinds.take(ids.take(first)) != TEXT).nonzero()[0].tolist():
        begin = rows.first[row]
        first[row] = begin + (sides.kinds.take(ids[begin : rows.last[row] + 1]) == TEXT).argmax()
    return first


def _begins_with_space(sides: Sides, ids: np.ndarray, rows: Rows, first: np.ndarray, side: int) -> np.ndarray:
    """`[B]` bool: the text itself begins with a space, the one that the tokenizer always adds not counted."""
    first = first[rows.of(side)]
    token = ids.take(first)
    spaces = sides.leading_spaces.take(token)
    if sides.tables[side].prefix == "none":
        return spaces > 0
    after = ids.take(np.minimum(first + 1, rows.last[rows.of(side)]))
    begins: np.ndarray = (spaces > 1) | ((sides.lengths.take(token) == 1) & (sides.leading_spaces.take(after) > 0))
    return begins
