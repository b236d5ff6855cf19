"""Pairs of special tokens: those of one role at the same byte."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np


def match_specials(student: np.ndarray, teacher: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Match specials by role, position and, where several are alike, their order.

    Args:
        student: `[n]` int64: of each of its specials, in order, a number that its counterpart has too.
        teacher: `[m]` int64: likewise.

    Returns:
        Of each side, which have a partner: indices, in order on both sides, the k-th with the k-th.
    """
    _, i, j = np.intersect1d(_numbered(student), _numbered(teacher), assume_unique=True, return_indices=True)
    # `intersect1d` orders by key, that is by byte on the axis and then role; pairs go in the order of tokens.
    order = np.argsort(i)  # [P]
    i, j = i[order], j[order]
    if (j[1:] < j[:-1]).any():
        kept = _increasing(j)
        i, j = i[kept], j[kept]
    return i, j


def _numbered(key: np.ndarray) -> np.ndarray:
    """Return `[n]` int64: equal keys made distinct by their rank of occurrence."""
    order = np.argsort(key, kind="stable")
    ranked = key[order]
    starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]][: len(ranked)])
    sizes = np.diff(np.r_[starts, len(ranked)])
    rank = np.arange(len(ranked)) - np.repeat(starts, sizes)  # [n]: 0, 1, … among equal keys
    result = np.empty_like(key)
    # Room for 2^16 of one role at one byte.
    result[order] = ranked << 16 | rank
    return result


def _increasing(values: np.ndarray) -> np.ndarray:
    """Return the indices of a longest increasing run of values, for specials in another order on the other side."""
    tails: list[int] = []
    at: list[int] = []
    before = np.full(len(values), -1, dtype=np.int64)
    for index, value in enumerate(values.tolist()):
        # `tails[k]` is the least end of an increasing run of k + 1 values, `at[k]` its index.
        length = bisect_left(tails, value)
        before[index] = at[length - 1] if length else -1
        tails[length : length + 1] = [value]
        at[length : length + 1] = [index]
    chain = [at[-1]]
    while before[chain[-1]] >= 0:
        chain.append(int(before[chain[-1]]))
    return np.array(chain[::-1], dtype=np.int64)
