"""The order in which classes that are not plain are compared, and where their tokens lie in that order.

A class with one token on each side is *plain*. The others are compared in blocks of one size, by the larger of their
two numbers of tokens. In a block of *narrow* classes the first tokens of all classes lie side by side, then the second
ones, and so on, so that adjacent lanes with a class each read adjacent entries; in one of *medium* classes the tokens
of a class do. Entries that fill a block up have no token. A *wide* class is a block by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# A lane takes a whole class of these; the tokens of a longer one are spread over lanes.
HEIGHTS = 2, 4, 8
"""Most tokens of narrow classes, by kind."""
LENGTHS = 32, 64, 128, 256
"""Most tokens of medium classes, by kind."""
TILE = 512
"""Entries of a block on each side; of a wide class those that are read at once."""

ALIGNED = 32
"""Entries of a wide class are a multiple of this, which is a word of bits."""


@dataclass(frozen=True)
class ClassLayout:
    """Classes that are not plain, in order, and both sides' tokens of them.

    Attributes:
        plain: `[C + 1]` bool by class.
        number: `[C + 1]` a class's place in the order; -1 = plain.
        blocks: `[blocks, 7]`: the kind of a block (its place among heights and lengths; behind these, a wide class),
            its first class, the one behind its last, and per side where its entries begin, then how many there are.
        members: Per side the tokens in order; -1 = an entry without one.
    """

    plain: np.ndarray
    number: np.ndarray
    blocks: np.ndarray
    members: tuple[np.ndarray, np.ndarray]


def class_layout(student_root: np.ndarray, teacher_root: np.ndarray, classes: int) -> ClassLayout:
    """Return the layout of the classes of two vocabularies.

    Args:
        student_root: `[V_s]` int64 class of each token; `classes` = none.
        teacher_root: `[V_t]`, likewise.
        classes: `C`.
    """
    roots = student_root, teacher_root
    sizes = np.stack([np.bincount(root, minlength=classes + 1) for root in roots])
    plain = (sizes == 1).all(0)
    # The entry behind the classes is of tokens without a root, however many there are.
    plain[classes] = False
    others = np.flatnonzero(~plain)
    others = others[_order(sizes[:, others], student_root, others)]
    number = np.full(classes + 1, -1)
    number[others] = np.arange(len(others))
    kinds = _kinds(sizes[:, others])
    blocks = _blocks(kinds)
    sides = [_members(number[root], sizes[k, others], kinds, blocks) for k, root in enumerate(roots)]
    columns = [sides[0][1], sides[1][1], sides[0][2], sides[1][2]]
    return ClassLayout(
        plain, number, np.concatenate([blocks, np.stack(columns, axis=1)], axis=1), (sides[0][0], sides[1][0])
    )


def _limits() -> np.ndarray:
    return np.array([*HEIGHTS, *LENGTHS])


def _kinds(sizes: np.ndarray) -> np.ndarray:
    kinds: np.ndarray = np.searchsorted(_limits(), sizes.max(0), side="left")
    return kinds


def _order(sizes: np.ndarray, student_root: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the order of classes: wide ones first; the others by kind and sizes, then as in the student's row."""
    first = np.zeros(others.max(initial=0) + 1, np.int64)
    student = student_root[::-1]
    known = student < len(first)
    # Backwards, so that the first token of a class is the one that stays.
    first[student[known]] = np.arange(len(student))[::-1][known]
    order: np.ndarray = np.lexsort((first[others], -sizes[1], -sizes[0], -_kinds(sizes)))
    return order


def _blocks(kinds: np.ndarray) -> np.ndarray:
    """Return kind, first class and the one behind the last of every block, `[blocks, 3]`."""
    rows = []
    for kind in np.unique(kinds)[::-1]:
        chosen = np.flatnonzero(kinds == kind)
        step = 1 if kind == len(_limits()) else TILE // int(_limits()[kind])
        rows += [[kind, at, min(at + step, chosen[-1] + 1)] for at in range(chosen[0], chosen[-1] + 1, step)]
    return np.array(rows, np.int64).reshape(-1, 3)


def _members(
    own: np.ndarray, sizes: np.ndarray, kinds: np.ndarray, blocks: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tokens in order, and where blocks begin and how many entries they have, both `[blocks]`.

    Args:
        own: `[V]` class of each token in the order; -1 = plain.
        sizes: `[M]` tokens of each class.
        kinds: `[M]` kinds of classes.
        blocks: The result of `_blocks`.
    """
    tokens = np.flatnonzero(own >= 0)
    tokens = tokens[np.argsort(own[tokens], kind="stable")]
    own = own[tokens]
    # [n] 0, 1, … within each class: tokens are sorted by class.
    rank = np.arange(len(own)) - (np.cumsum(sizes) - sizes)[own]
    limit = np.append(_limits(), 0)
    lengths = np.where(blocks[:, 0] < len(limit) - 1, TILE, -(-sizes[blocks[:, 1]] // ALIGNED) * ALIGNED)
    firsts = np.cumsum(lengths) - lengths
    block = np.searchsorted(blocks[:, 1], own, side="right") - 1
    within, kind = own - blocks[block, 1], kinds[own]
    across = rank * (TILE // np.maximum(limit, 1))[kind] + within  # narrow
    along = within * limit[kind] + rank  # medium, and wide ones, which are the first of their block
    members = np.full(int(lengths.sum()), -1)
    members[firsts[block] + np.where(kind < len(HEIGHTS), across, along)] = tokens
    return members, firsts, lengths
