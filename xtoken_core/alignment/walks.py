"""Tokens of one row as intervals of a byte stream, and the same intervals after a change of the stream."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from xtoken_core.alignment.normalizer import Normalizer
from xtoken_core.alignment.pipeline import LocatedTokens

# Symbols that must agree before the walk resumes (one uint64 holds four); fewer meet by chance everywhere.
_ANCHOR = 4
_WINDOW = 32


@dataclass(frozen=True)
class Walk:
    """One row's tokens as intervals of a byte stream.

    Attributes:
        begins: `[n]` int64: where every token begins.
        ends: `[n]` int64: where it ends.
        text: `[n]` bool: it spells something.
        known: `[n]` bool: it spells the bytes of the stream between.
        clean: `[n]` bool: it ends where the stream may be cut.
        stream: uint16: the bytes; above 255 where they are not known.
        erased: `[n]` bool: it spells something of which nothing is left in the stream.
        trimmed: `[n]` int64: bytes at a token's beginning that its tokenizer added and that are not counted.
        own: Bytes at the beginning of the stream that the tokenizer added.
    """

    begins: np.ndarray
    ends: np.ndarray
    text: np.ndarray
    known: np.ndarray
    clean: np.ndarray
    stream: np.ndarray
    erased: np.ndarray
    trimmed: np.ndarray
    own: int = 0

    @property
    def bounds(self) -> np.ndarray:
        """Return the sorted positions at which a token of text ends and the stream may be cut."""
        return np.unique(self.ends[self.text & self.clean])


def located_walk(placed: LocatedTokens) -> Walk:
    """Return the tokens on the normalised source text, without the text that the tokenizer puts before it."""
    # Before the first position at which both texts have moved lies only what the tokenizer put there.
    own = int(placed.target[moves(placed).cumsum() == 0].max(initial=0))
    return Walk(
        begins=np.maximum(placed.begins, own),
        ends=placed.ends,
        text=(placed.ends > np.maximum(placed.begins, own)),
        known=placed.known,
        clean=np.ones(len(placed.ends), dtype=bool),
        stream=np.frombuffer(placed.data, dtype=np.uint8).astype(np.uint16),
        erased=np.zeros(len(placed.ends), dtype=bool),
        trimmed=np.maximum(own - placed.begins, 0),
        own=own,
    )


def moves(placed: LocatedTokens) -> np.ndarray:
    """Return `[K]` bool, True where source and normalised text both continue behind the positions before."""
    return (np.diff(placed.source, prepend=0) > 0) & (np.diff(placed.target, prepend=0) > 0)


def normalised_walk(walk: Walk, normalizer: Normalizer) -> Walk:
    """Map the tokens to the normalised text; the stream from the first unknown byte on is kept."""
    whole = walk.stream <= 255
    size = int(whole.argmin()) if not whole.all() else len(whole)
    data = walk.stream[:size].astype(np.uint8).tobytes()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        # A character that truncation has cut: its bytes are kept as they are, like unknown ones.
        size = error.start
        text = data[:size].decode()
    trace = normalizer.trace(text)
    # The trace counts characters, walks count bytes: [K] byte offsets of the same positions.
    source, target = (
        np.cumsum([0, *(len(char.encode()) for char in string)])[at]
        for string, at in ((text, trace.source), (trace.text, trace.target))
    )
    rest = walk.stream[size:]
    stream = np.concatenate([np.frombuffer(trace.text.encode(), dtype=np.uint8).astype(np.uint16), rest])
    # A token that ends inside of what is mapped as one ends behind all of it, and not where the stream may be cut.
    at = np.searchsorted(source, np.minimum(walk.ends, size), side="left")
    ends = np.where(walk.ends > size, walk.ends - size + target[-1], target[at])
    clean = (walk.ends > size) | (source[at] == walk.ends)
    # Tokens stay contiguous, also those that now end together behind one mapped cluster.
    begins = np.r_[0, ends[:-1]]
    # One that begins inside of it spells a part of it, though no bytes of its own are left.
    first = target[np.searchsorted(source, np.minimum(walk.begins, size), side="right") - 1]
    text_left = (ends > begins) | ((walk.begins < size) & (ends > first))
    erased = walk.text & ~text_left
    return Walk(begins, ends, walk.text & text_left, walk.known, walk.clean & clean, stream, erased, walk.trimmed)


def walk_without_whitespace(walk: Walk) -> Walk:
    """Map the tokens to the stream without whitespace, where the other tokenizer drops it."""
    space = np.isin(walk.stream, np.frombuffer(b" \t\n\r\v\f", dtype=np.uint8))
    # [K + 1]: bytes that are left before each position.
    kept = np.r_[0, np.cumsum(~space)]
    begins, ends = kept[walk.begins], kept[walk.ends]
    # Of the tokens inside of what is mapped as one, the first has all of its bytes.
    first = np.where(walk.ends > walk.begins, np.arange(len(ends)), np.searchsorted(walk.ends, walk.ends))
    text = walk.text & (ends > begins)[first]
    erased = walk.erased | (walk.text & ~text)
    return replace(walk, begins=begins, ends=ends, text=text, stream=walk.stream[~space], erased=erased)


def matching_blocks(a: np.ndarray, b: np.ndarray) -> list[tuple[int, int, int]]:
    """Return stretches `(i, j, n)`, ascending, with `a[i:i+n] == b[j:j+n]`.

    After a difference the walk resumes at the nearest four symbols that both streams have in common; the window in
    which they are searched doubles until it holds some, so that the whole takes time in proportion to the streams
    (times a logarithm).

    Args:
        a: uint16; values above 255 are unknown symbols and equal nothing.
        b: Likewise.
    """
    blocks: list[tuple[int, int, int]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        if length := _common_prefix(a, b, i, j):
            blocks.append((i, j, length))
            i, j = i + length, j + length
            continue
        resumed = _resume(a, b, i, j)
        if resumed is None:
            # No four symbols in common are left: only the ends may still agree.
            tail = _common_prefix(a[i:][::-1], b[j:][::-1], 0, 0)
            return [*blocks, (len(a) - tail, len(b) - tail, tail)] if tail else blocks
        i, j = resumed
    return blocks


def differ(a: np.ndarray, b: np.ndarray, i: int, j: int) -> bool:
    """Return True if `a[i]` and `b[j]` exist, are known bytes and differ."""
    return bool(i < len(a) and j < len(b) and a[i] != b[j] and max(a[i], b[j]) <= 255)


def is_once(block: np.ndarray, stream: np.ndarray) -> bool:
    """Return True if a block occurs once in a stream, both uint16."""
    data, part = stream.tobytes(), block.tobytes()
    at = data.find(part)
    while at % 2:  # between two symbols
        at = data.find(part, at + 1)
    again = data.find(part, at + 1)
    while again >= 0 and again % 2:
        again = data.find(part, again + 1)
    return again < 0


def _common_prefix(a: np.ndarray, b: np.ndarray, i: int, j: int) -> int:
    # Growing steps: a difference nearby costs little, and long agreement few comparisons.
    length, step = 0, 64
    while True:
        x, y = a[i + length : i + length + step], b[j + length : j + length + step]
        size = min(len(x), len(y))
        differs = (x[:size] != y[:size]) | (x[:size] > 255)
        if differs.any():
            return length + int(differs.argmax())
        length += size
        if size < step:
            return length
        step *= 2


def _resume(a: np.ndarray, b: np.ndarray, i: int, j: int) -> tuple[int, int] | None:
    window = _WINDOW
    while True:
        grams_a, grams_b = _grams(a[i : i + window]), _grams(b[j : j + window])
        _, at_a, at_b = np.intersect1d(grams_a, grams_b, return_indices=True)
        known = a[i + at_a] <= 255
        for offset in range(1, _ANCHOR):
            known &= a[i + at_a + offset] <= 255
        at_a, at_b = at_a[known], at_b[known]
        if len(at_a):
            # The nearest: it skips the fewest symbols of both streams.
            best = int(np.argmin(at_a + at_b))
            return i + int(at_a[best]), j + int(at_b[best])
        if i + window >= len(a) and j + window >= len(b):
            return None
        window *= 2


def _grams(symbols: np.ndarray) -> np.ndarray:
    """Return every four neighbouring symbols as one uint64."""
    count = max(len(symbols) - _ANCHOR + 1, 0)
    grams = np.zeros(count, dtype=np.uint64)
    for offset in range(_ANCHOR):
        grams = grams << np.uint64(16) | symbols[offset : offset + count].astype(np.uint64)
    return grams
