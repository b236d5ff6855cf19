"""Reports on chain tables: common tokens, tokens without a root and why, and the chunks of a text by shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from xtoken_core.alignment.report import ShownToken
from xtoken_core.alignment.tables import SPECIAL, TokenTable
from xtoken_core.chain.spelling import NO_TEXT, REASONS
from xtoken_core.chain.tables import ChainTables, SideTable

SHAPES = ("1:1", "1:n", "n:1", "m:n")
"""Shapes of a chunk: tokens of the student and of the teacher."""


@dataclass(frozen=True)
class SideReport:
    """Token counts of one tokenizer: with and without a root.

    Attributes:
        tokens: Size of the vocabulary.
        with_root: Tokens that have a class.
        without_root: Numbers of tokens without one, by reason; specials that stand for no text are left out.
        examples: By reason, some of these tokens as text.
        spelled: By number of the other side's tokens, how many tokens are spelled so.
    """

    tokens: int
    with_root: int
    without_root: dict[str, int]
    examples: dict[str, list[str]]
    spelled: dict[int, int]


@dataclass(frozen=True)
class TextReport:
    """The chunks of a text.

    Attributes:
        chunks: Correct chunks.
        incorrect: Chunks that are not correct and are not compared.
        shapes: Correct chunks by shape.
        examples: By shape, some chunks as text: the student's tokens, the teacher's tokens.
        rootless: Tokens of either side in the text that have no root.
    """

    chunks: int
    incorrect: int
    shapes: dict[str, int]
    examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    rootless: tuple[int, int] = (0, 0)


def side_report(side: SideTable, classes: int, table: TokenTable, *, samples: int) -> SideReport:
    """Count one side's tokens.

    Args:
        side: Its part of the tables.
        classes: Number of root classes.
        table: What its tokens spell.
        samples: Examples of each reason, at most.
    """
    root, status = side.root.numpy(), side.status.numpy()
    special = np.asarray(table.kinds)[: len(root)] == SPECIAL
    missing = np.flatnonzero((root == classes) & ~(special & (status == NO_TEXT)))
    without: dict[str, int] = {}
    examples: dict[str, list[str]] = {}
    for value, count in sorted(Counter(status[missing].tolist()).items()):
        without[REASONS[value]] = count
        ids = missing[status[missing] == value][:samples]
        examples[REASONS[value]] = [table.shown(int(i)) for i in ids]
    lengths = Counter(np.diff(side.spelling_start.numpy()).tolist())
    lengths.pop(0, None)
    return SideReport(len(root), int((root != classes).sum()), without, examples, dict(sorted(lengths.items())))


def text_report(
    sides: Sequence[Sequence[ShownToken]], ids: Sequence[Sequence[int]], tables: ChainTables, *, samples: int
) -> TextReport:
    """Count the chunks of a text.

    Args:
        sides: The student's and the teacher's tokens with their chunks.
        ids: Their ids.
        tables: The tables.
        samples: Examples of each shape, at most.
    """
    chunks: dict[int, tuple[list[str], list[str]]] = {}
    correct: dict[int, bool] = {}
    for number, tokens in enumerate(sides):
        for token in tokens:
            if token.chunk >= 0:
                chunks.setdefault(token.chunk, ([], []))[number].append(token.text)
                correct[token.chunk] = token.correct
    shapes = dict.fromkeys(SHAPES, 0)
    examples: dict[str, list[tuple[str, str]]] = {shape: [] for shape in SHAPES}
    for chunk, (ours, theirs) in sorted(chunks.items()):
        if not (correct[chunk] and ours and theirs):
            continue
        shape = shape_of(len(ours), len(theirs))
        shapes[shape] += 1
        pair = "|".join(ours), "|".join(theirs)
        if len(examples[shape]) < samples and pair not in examples[shape]:
            examples[shape].append(pair)
    roots = tables.student.root, tables.teacher.root
    rootless = [
        int((root[list(own)] == tables.classes).sum()) if len(own) else 0 for root, own in zip(roots, ids, strict=True)
    ]
    wrong = sum(not each for each in correct.values())
    return TextReport(sum(shapes.values()), wrong, shapes, examples, (rootless[0], rootless[1]))


def shape_of(student: int, teacher: int) -> str:
    """Return the shape of a chunk by its tokens on both sides.

    >>> shape_of(1, 1), shape_of(1, 3), shape_of(2, 1), shape_of(2, 2)
    ('1:1', '1:n', 'n:1', 'm:n')
    """
    if student == 1:
        return "1:1" if teacher == 1 else "1:n"
    return "n:1" if teacher == 1 else "m:n"
