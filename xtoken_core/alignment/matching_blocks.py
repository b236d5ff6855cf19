"""Matching blocks of two byte streams that should be equal: exact, for the rare rows in which they are not."""

from __future__ import annotations

import numpy as np

# Symbols that must agree before the walk resumes (one uint64 holds four); fewer meet by chance everywhere.
_ANCHOR = 4
_WINDOW = 32


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
