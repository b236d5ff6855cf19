"""Where the tokens of classes that are not plain lie for kernels of which a lane reads every row of its column.

A *block* holds `LANES / width` classes; each has `width` adjacent lanes, and its tokens fill their columns row by row.
Both sides of a block have as many rows as their largest class there needs. Classes of one width and similar sizes
share a block, so that few entries have no token. Adjacent blocks of one width are a *task*: its terms are one sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from xtoken_core.chain.class_layout import ClassLayout, class_layout

CLASS_KERNEL = "tiles"
"""How classes are compared: in "tiles" of `class_layout`, or in "columns"."""
LANES = 128
"""Lanes of a block, a multiple of a word of bits."""
WIDTHS = {1: 8, 8: 64, 32: 512}
"""Lanes of a class, and the most tokens on a side for which it has so many; a larger one has all lanes of a block."""
SHAPES = (1, 2), (2, 1), (2, 2)
"""Rows of both sides of blocks, a lane for a class, that have launches of their own."""
TASK_ROWS = 48
"""Rows of a task's blocks, both sides together, that a task does not pass; each block counts as two more."""
WORD = 32


@dataclass(frozen=True)
class ColumnLayout(ClassLayout):
    """Classes that are not plain, in order, and both sides' tokens of them; `blocks` are tasks.

    Attributes:
        blocks: `[tasks, 2]`, the first block of a task, and the one behind its last.
        table: `[blocks, 6]`: first class, the one behind the last, per side where entries begin, then how many rows.
        launches: `(width, rows of the student, rows of the teacher, first task, the one behind the last)`; rows are 0
            where blocks have different ones.
    """

    table: np.ndarray
    launches: tuple[tuple[int, int, int, int, int], ...]


def compared_layout(student_root: np.ndarray, teacher_root: np.ndarray, classes: int) -> ClassLayout:
    """Return the layout of the classes of two vocabularies in which they are compared."""
    if CLASS_KERNEL == "columns":
        return column_layout(student_root, teacher_root, classes)
    return class_layout(student_root, teacher_root, classes)


def column_layout(student_root: np.ndarray, teacher_root: np.ndarray, classes: int) -> ColumnLayout:
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
    others = np.flatnonzero(~plain[:classes])
    kinds = _kinds(sizes[:, others])
    groups = _groups(kinds, sizes[:, others])
    rows = -(-sizes[:, others] // _widths()[kinds])
    order = np.lexsort((_first(student_root, classes)[others], rows[1], rows[0], -groups))
    others, groups, of_class = others[order], groups[order], _widths()[kinds[order]]
    number = np.full(classes + 1, -1)
    number[others] = np.arange(len(others))
    bounds = _bounds(groups, of_class)
    widths = of_class[bounds[:, 0]]
    heights = [_heights(sizes[k, others], bounds, widths) for k in (0, 1)]
    sides = [_members(number[root], sizes[k, others], bounds, widths, heights[k]) for k, root in enumerate(roots)]
    table = np.column_stack([bounds, sides[0][1], sides[1][1], *heights]).reshape(-1, 6)
    tasks, launches = _tasks(groups[bounds[:, 0]], widths, heights[0] + heights[1])
    return ColumnLayout(plain, number, tasks, (sides[0][0], sides[1][0]), table, launches)


def _widths() -> np.ndarray:
    return np.array([*WIDTHS, LANES])


def _kinds(sizes: np.ndarray) -> np.ndarray:
    kinds: np.ndarray = np.searchsorted(np.array(list(WIDTHS.values())), sizes.max(0), side="left")
    return kinds


def _first(root: np.ndarray, classes: int) -> np.ndarray:
    """Return the first token of each class, `[classes + 1]`, 0 = none."""
    first = np.zeros(classes + 1, np.int64)
    first[root[::-1]] = np.arange(len(root))[::-1]
    return first


def _groups(kinds: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return a number per class: its kind, or that of its shape, behind the kinds."""
    groups = kinds.copy()
    for at, (student, teacher) in enumerate(SHAPES):
        groups[(kinds == 0) & (sizes[0] == student) & (sizes[1] == teacher)] = len(_widths()) + at
    return groups


def _bounds(groups: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Return the first class of each block and the one behind its last, `[blocks, 2]`."""
    rows = [
        (at, min(at + LANES // int(widths[begin]), end))
        for begin, end in _runs(groups)
        for at in range(begin, end, LANES // int(widths[begin]))
    ]
    return np.array(rows, np.int64).reshape(-1, 2)


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    """Return where runs of equal values begin and end."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [(begin, end) for begin, end in pairwise(edges) if end > begin]


def _heights(sizes: np.ndarray, bounds: np.ndarray, widths: np.ndarray) -> np.ndarray:
    largest = np.array([sizes[first:last].max() for first, last in bounds.tolist()], np.int64)
    heights: np.ndarray = -(-largest // widths)
    return heights


def _members(
    own: np.ndarray, sizes: np.ndarray, bounds: np.ndarray, widths: np.ndarray, heights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens in order, -1 = an entry without one, and where the entries of blocks begin, `[blocks]`."""
    tokens = np.flatnonzero(own >= 0)
    tokens = tokens[np.argsort(own[tokens], kind="stable")]
    own = own[tokens]
    rank = np.arange(len(own)) - (np.cumsum(sizes) - sizes)[own]
    firsts = (np.cumsum(heights) - heights) * LANES
    block = np.searchsorted(bounds[:, 0], own, side="right") - 1
    width = widths[block]
    members = np.full(int(heights.sum()) * LANES, -1)
    members[firsts[block] + rank // width * LANES + (own - bounds[block, 0]) * width + rank % width] = tokens
    return members, firsts


def _tasks(
    groups: np.ndarray, widths: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, tuple[tuple[int, int, int, int, int], ...]]:
    """Return the blocks of tasks, `[tasks, 2]`, and the launches.

    Args:
        groups: `[blocks]`, of the classes of a block.
        widths: `[blocks]`.
        rows: `[blocks]`, of both sides together.
    """
    tasks: list[tuple[int, int]] = []
    launches = []
    for begin, end in _runs(groups):
        first_task, left = len(tasks), 0
        for block in range(begin, end):
            cost = int(rows[block]) + 2
            if left >= cost:
                tasks[-1] = tasks[-1][0], block + 1
                left -= cost
            else:
                tasks.append((block, block + 1))
                left = TASK_ROWS - cost
        of_shape = int(groups[begin]) - len(_widths())
        student, teacher = SHAPES[of_shape] if of_shape >= 0 else (0, 0)
        launches.append((int(widths[begin]), student, teacher, first_task, len(tasks)))
    return np.array(tasks, np.int64).reshape(-1, 2), tuple(launches)
