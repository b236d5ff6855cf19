"""Leading spaces added by a tokenizer (SentencePiece's dummy prefix), distinguished from those of the text."""

from __future__ import annotations

import numpy as np

from xtoken_core.alignment.flat_layout import FlatLayout
from xtoken_core.alignment.tables import TEXT
from xtoken_core.alignment.token_arrays import TokenArrays


def find_dummy_prefixes(
    sides: TokenArrays, ids: np.ndarray, rows: FlatLayout, zero_length: np.ndarray, *, suspected: bool = False
) -> np.ndarray:
    """Return the indices of tokens whose leading space is the tokenizer's own.

    Those are the first text token of a row and of every separately tokenized stretch (one after absent tokens)
    and, for some tokenizers, those after a special. A tokenizer that adds a space only where it is missing, or whose
    row begins behind a gap or with a single space, has added none to a row that begins with a space on the other side
    too: the row continues a text. Where both add one only if it is missing, it counts as the text's, since both sides
    spell it.

    Args:
        sides: Both sides' arrays.
        ids: `[n]` int64: all rows of the student, then all of the teacher with the sides' offset added.
        rows: Where the rows lie; none is empty.
        zero_length: Indices of the tokens that spell nothing, in order; absent tokens and specials are among them.
        suspected: Also those that rather are the text's.
    """
    prefixes = sides.prefixes
    if prefixes == ("none", "none"):
        return np.zeros(0, dtype=np.int64)
    first, spaces = _first_text(sides, ids, rows)  # [2B], [2B]
    absent = sides.absent
    quiet, split = ids.take(zero_length), int(zero_length.searchsorted(rows.split))
    dummy_prefixed = []
    for side, prefix in enumerate(prefixes):
        if prefix == "none":
            continue
        mine, part = rows.of(side), slice(split) if side == 0 else slice(split, None)
        gaps = quiet[part] == absent[side]
        own, spaced = first[mine], spaces[mine] > 0  # [B], [B]
        if suspected:
            pass
        elif prefix == prefixes[1 - side] == "missing":
            # Either would have added none to a text with a space: one on both sides is the text's.
            spaced &= spaces[rows.of(1 - side)] == 0
        elif prefix == "missing":
            # This one adds none to a text that begins with a space, and the other side shows whether this one does.
            spaced &= ~_begins_with_space(sides, ids, rows, first, spaces, 1 - side)
        else:
            # It adds one to every text, but a row that continues a text was not given to it as one.
            continues = _has_one_space(sides, ids, rows, first, spaces, side)
            if np.count_nonzero(gaps):
                continues |= (own > rows.first[mine]) & (ids.take(own - 1, mode="wrap") == absent[side])
            spaced &= ~(continues & _begins_with_space(sides, ids, rows, first, spaces, 1 - side))
        dummy_prefixed.append(own[spaced])
        breaks = sides.kinds.take(quiet[part]) != TEXT if sides.tables[side].prefix_after_special else gaps
        if np.count_nonzero(breaks):
            after = _text_after(sides, ids, rows, side, zero_length[part][breaks] + 1, own)
            dummy_prefixed.append(after[sides.leading_spaces.take(ids.take(after)) > 0])
    return dummy_prefixed[0] if len(dummy_prefixed) == 1 else np.concatenate(dummy_prefixed)


def begin_with_spaces(sides: TokenArrays, ids: np.ndarray, rows: FlatLayout) -> np.ndarray:
    """Return `[B]` bool, True where the first text tokens of both sides begin with a space."""
    _, spaces = _first_text(sides, ids, rows)
    return (spaces[rows.of(0)] > 0) & (spaces[rows.of(1)] > 0)


def _text_after(
    sides: TokenArrays, ids: np.ndarray, rows: FlatLayout, side: int, after: np.ndarray, first: np.ndarray
) -> np.ndarray:
    """Return, of the tokens after breaks, those of text in the break's row that are not its first text."""
    row = (after - 1 - side * rows.split) // rows.widths[side]  # [k]
    inside = (after <= rows.last[rows.of(side)].take(row)) & (first.take(row) != after)
    after = after[inside]
    of_text: np.ndarray = after[sides.kinds.take(ids.take(after)) == TEXT]
    return of_text


def _first_text(sides: TokenArrays, ids: np.ndarray, rows: FlatLayout) -> tuple[np.ndarray, np.ndarray]:
    """Return `[2B]` each: index of each row's first text token (of its first token if none); its leading spaces."""
    first: np.ndarray = rows.first + (sides.kinds.take(ids.take(rows.head)) == TEXT).argmax(axis=1)
    token = ids.take(first)
    if np.count_nonzero(sides.kinds.take(token)):
        # Rare: the first text lies behind `rows.head`, or there is none.
        for row in (sides.kinds.take(token) != TEXT).nonzero()[0].tolist():
            begin = rows.first[row]
            first[row] = begin + (sides.kinds.take(ids[begin : rows.last[row] + 1]) == TEXT).argmax()
        token = ids.take(first)
    return first, sides.leading_spaces.take(token)


def _begins_with_space(
    sides: TokenArrays, ids: np.ndarray, rows: FlatLayout, first: np.ndarray, spaces: np.ndarray, side: int
) -> np.ndarray:
    """Return `[B]` bool: the text itself begins with a space, not counting the one that the tokenizer always adds."""
    mine = rows.of(side)
    if sides.prefixes[side] == "none":
        return spaces[mine] > 0
    after = ids.take(np.minimum(first[mine] + 1, rows.last[mine]))
    alone = sides.lengths.take(ids.take(first[mine])) == 1
    begins: np.ndarray = (spaces[mine] > 1) | (alone & (sides.leading_spaces.take(after) > 0))
    return begins


def _has_one_space(
    sides: TokenArrays, ids: np.ndarray, rows: FlatLayout, first: np.ndarray, spaces: np.ndarray, side: int
) -> np.ndarray:
    """Return `[B]` bool: the row begins with a single space, and text follows it."""
    mine = rows.of(side)
    after = ids.take(np.minimum(first[mine] + 1, rows.last[mine]))
    alone = sides.lengths.take(ids.take(first[mine])) == 1
    follows = (sides.leading_spaces.take(after) == 0) & (sides.kinds.take(after) == TEXT)
    one: np.ndarray = (spaces[mine] == 1) & (~alone | follows)
    return one
