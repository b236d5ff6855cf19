"""Live sets written out, row by row: what their compressed form means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xtoken_core.chain.live_sets import JOINED, KEPT, LiveSets


def live_rows(sets: LiveSets, after: Sequence[int]) -> np.ndarray:
    """Return `[n, V_x]` bool: which tokens may follow each of some tokens."""
    rows = np.zeros((len(after), len(sets.head)), dtype=bool)
    for row, w in zip(rows, after, strict=True):
        # Every rule blocks the positions `point` and `low .. high - 1`. Difference array: add 1 where an interval
        # begins, subtract 1 behind its end; the cumulative sum counts the intervals that hold a position.
        change = np.zeros(sets.width + 2, dtype=np.int64)
        for begin, end in _slices(sets, w):
            np.add.at(change, sets.point[begin:end], 1)
            np.add.at(change, sets.point[begin:end] + 1, -1)
            np.add.at(change, sets.low[begin:end], 1)
            np.add.at(change, sets.high[begin:end], -1)
        blocked = np.cumsum(change)[sets.position] > 0  # [K, V_x]
        state = sets.state[sets.tail[w], sets.head]
        joined = state == JOINED + np.arange(len(blocked))[:, None]
        row[:] = (state == KEPT) | (joined & ~blocked).any(axis=0)
    return rows


def _slices(sets: LiveSets, w: int) -> list[tuple[int, int]]:
    found = [(int(sets.rule_start[w]), int(sets.rule_start[w + 1]))]
    while w >= 0:
        # Down the right spine: every token on it may be what a rule joins to the next one.
        found.append((int(sets.tail_start[w]), int(sets.tail_start[w] + sets.tail_count[w])))
        w = int(sets.right[w])
    return found
