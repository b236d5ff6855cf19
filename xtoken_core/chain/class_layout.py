"""The order in which classes that are not plain are compared, and where their tokens lie in that order.

A class with one token on each side is *plain*. Of the others, *wide* and *medium* classes have their tokens one after
the other. *Narrow* ones lie in blocks: first the first token of every class of the block, then the second ones, and so
on, so that adjacent lanes with a class each read adjacent entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NARROW, MEDIUM = 8, 64
"""Most tokens of a class that has one lane, and of one that has a few."""
NARROW_CLASSES, MEDIUM_CLASSES, WIDE_CLASSES = 256, 8, 2
"""Classes of a block by kind."""


@dataclass(frozen=True)
class ClassLayout:
    """Classes that are not plain, in order, and both sides' tokens of them.

    Attributes:
        plain: `[C + 1]` bool by class.
        number: `[C + 1]` a class's place in the order; -1 = plain.
        blocks: `[blocks, 7]`: the kind of a block (0 narrow, 1 medium, 2 wide), its first class, the one behind its
            last, the most tokens that one of them has on the student's and on the teacher's side, and where its
            tokens begin on both.
        starts: Per side `[M + 1]`, where the tokens of a class begin; of medium and wide classes alone.
        members: Per side the tokens in order; -1 = padding of a block of narrow classes.
    """

    plain: np.ndarray
    number: np.ndarray
    blocks: np.ndarray
    starts: tuple[np.ndarray, np.ndarray]
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
    plain[classes] = False
    others = np.flatnonzero(~plain)
    others = others[_order(sizes[:, others], student_root, others)]
    number = np.full(classes + 1, -1)
    number[others] = np.arange(len(others))
    blocks = _blocks(sizes[:, others])
    sides = [_members(number[root], len(others), blocks, 3 + k) for k, root in enumerate(roots)]
    firsts = np.stack([side[2] for side in sides], axis=1)
    starts, members = (sides[0][0], sides[1][0]), (sides[0][1], sides[1][1])
    return ClassLayout(plain, number, np.concatenate([blocks, firsts], axis=1), starts, members)


def _kinds(sizes: np.ndarray) -> np.ndarray:
    """Return 0 for narrow classes, 1 for medium and 2 for wide ones."""
    kinds: np.ndarray = np.searchsorted(np.array([NARROW, MEDIUM]), sizes.max(0), side="left")
    return kinds


def _order(sizes: np.ndarray, student_root: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the order of classes: wide ones first; the others by sizes, and then as they lie in the student's row."""
    first = np.zeros(others.max(initial=0) + 1, np.int64)
    student = student_root[::-1]
    known = student < len(first)
    first[student[known]] = np.arange(len(student))[::-1][known]
    order: np.ndarray = np.lexsort((first[others], -sizes[1], -sizes[0], -_kinds(sizes)))
    return order


def _blocks(sizes: np.ndarray) -> np.ndarray:
    """Return the blocks of classes in order, `[blocks, 5]`."""
    kinds, rows = _kinds(sizes), []
    for kind, step in ((2, WIDE_CLASSES), (1, MEDIUM_CLASSES), (0, NARROW_CLASSES)):
        chosen = np.flatnonzero(kinds == kind)
        for at in range(0, len(chosen), step):
            block = chosen[at : at + step]
            rows.append([kind, block[0], block[-1] + 1, *sizes[:, block].max(1)])
    return np.array(rows, np.int64).reshape(-1, 5)


def _members(own: np.ndarray, M: int, blocks: np.ndarray, height: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where classes begin, `[M + 1]`, the tokens in order, and where blocks begin, `[blocks]`.

    Args:
        own: `[V]` class of each token in the order; -1 = plain.
        M: Number of classes.
        blocks: The result of `_blocks`.
        height: Column of `blocks` that has the side's most tokens of a class.
    """
    tokens = np.flatnonzero(own >= 0)
    tokens = tokens[np.argsort(own[tokens], kind="stable")]
    own = own[tokens]
    start = np.concatenate([[0], np.cumsum(np.bincount(own, minlength=M))])
    narrow = blocks[:, 0] == 0
    begin = int(blocks[narrow, 1].min(initial=M))
    lengths = np.where(narrow, blocks[:, height] * NARROW_CLASSES, 0)
    firsts = np.where(narrow, start[begin] + np.cumsum(lengths) - lengths, start[blocks[:, 1]])
    members = np.full(int(start[begin] + lengths.sum()), -1)
    members[: start[begin]] = tokens[: start[begin]]
    rank = (np.arange(len(tokens)) - start[own])[start[begin] :]
    tokens, own = tokens[start[begin] :], own[start[begin] :]
    block = np.searchsorted(blocks[:, 1], own, side="right") - 1
    members[firsts[block] + rank * NARROW_CLASSES + own - blocks[block, 1]] = tokens
    return start, members, firsts
