"""Steps of the alignment of one row, each alone: streams, their cuts, and tokens placed on a text."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from tests.support import vocabularies as v
from tests.support.alignments import table_of
from xtoken_core.alignment import slow_path, walks
from xtoken_core.alignment.flat_layout import FlatLayout
from xtoken_core.alignment.normalizer import Normalizer, Step
from xtoken_core.alignment.pipeline import LocatedTokens, Pipeline
from xtoken_core.alignment.prefix_space import find_dummy_prefixes
from xtoken_core.alignment.tables import UNKNOWN, token_table
from xtoken_core.alignment.token_arrays import build_token_arrays

NOTHING = 256
"""The symbol of an unknown token."""


def walk(*pieces: str | None) -> walks.Walk:
    """Tokens that spell these pieces; None: an unknown one."""
    symbols = [[NOTHING] if piece is None else list(piece.encode()) for piece in pieces]
    ends = np.cumsum([len(part) for part in symbols])
    none = np.zeros(len(pieces), dtype=bool)
    return walks.Walk(
        begins=np.r_[0, ends[:-1]], ends=ends, text=~none, known=np.array([piece is not None for piece in pieces]),
        clean=~none, stream=np.array([*chain(*symbols)], dtype=np.uint16), erased=none,
        trimmed=np.zeros(len(pieces), dtype=np.int64),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("x", "y", "cuts"),
    [
        (("ab", "c", "x"), ("ab", "d", "x"), [(2, 2, True), (3, 3, False), (4, 4, False)]),
        (("A", "12345678", "!"), ("B", "12345678", "?"), [(1, 1, False), (9, 9, True)]),
        (("A", "1234567", "!"), ("B", "1234567", "?"), [(1, 1, False), (8, 8, False)]),
        (("A", "12345678", "12345678"), ("B", "12345678", "?"), [(1, 1, False), (9, 9, False)]),
    ],
    ids=["the beginning", "eight bytes", "seven bytes", "twice"],
)
def test_cuts_in_stretches_in_common(x, y, cuts):
    found = slow_path._block_cuts(walk(*x), walk(*y), certain=True, maps=False)
    assert list(zip(found.student.tolist(), found.teacher.tolist(), found.same.tolist(), strict=True)) == cuts


@pytest.mark.parametrize(
    ("unknown", "length", "explained"), [(1, 65, True), (1, 66, False), (2, 100, True), (2, 131, False), (0, 3, False)]
)
def test_unknown_tokens_stand_for_up_to_64_bytes_each(unknown, length, explained):
    x = walk(*[None] * unknown or ["b"])
    rest = slow_path._unknown_rest(x, walk("a" * length), [np.zeros((0, 2), dtype=np.int64)])
    assert [part.tolist() for part in rest] == ([[[unknown, length]]] if explained else [])


def test_a_stream_without_whitespace():
    bare = walks.walk_without_whitespace(walk("a b", " ", " c"))
    assert bytes(bare.stream.astype(np.uint8)) == b"abc"
    assert (bare.begins.tolist(), bare.ends.tolist()) == ([0, 2, 2], [2, 2, 3])
    assert (bare.text.tolist(), bare.erased.tolist()) == ([True, False, True], [False, True, False])


def test_a_token_of_which_nothing_is_left_is_erased():
    step = Step("Clean", "{}", lambda text: text.replace("\x01", ""))
    cleaned = walks.normalised_walk(walk("a", "\x01", "b"), Normalizer((step,)))
    assert bytes(cleaned.stream.astype(np.uint8)) == b"ab"
    assert (cleaned.text.tolist(), cleaned.erased.tolist()) == ([True, False, True], [False, True, False])


def test_what_one_side_leaves_out_is_no_image_of_the_others():
    at = np.arange(3)
    ours = LocatedTokens(b"a", at, np.array([0, 1, 1]), np.array([0]), np.array([1]), np.array([True]))
    theirs = LocatedTokens(b"ab", at, at, np.array([0, 1]), np.array([1, 2]), np.array([True, True]))
    cuts = slow_path._source_cuts(walk("a"), walk("a", "b"), ours, theirs)
    assert list(zip(cuts.student.tolist(), cuts.teacher.tolist(), cuts.same.tolist(), strict=True)) == [
        (1, 1, True), (1, 2, False),
    ]  # fmt: skip


def test_a_token_is_compared_without_its_tokenizers_space():
    pieces = [b" a", b"b", b" "]
    tokenizer = v.byte_level(300)
    arrays = build_token_arrays(*[table_of(pieces)] * 2, pieces, pieces).student
    pipeline = Pipeline(tokenizer, token_table(tokenizer))
    side = slow_path.RowSide(arrays, pipeline, np.arange(3), np.zeros(3, dtype=bool))
    tokens = walk(" a", "b", " ")
    assert [slow_path._spelling(side, tokens, at) for at in range(3)] == pieces
    trimmed = replace(tokens, trimmed=np.array([1, 1, 1]))
    assert [slow_path._spelling(side, trimmed, at) for at in range(3)] == [b"a", b"b", b""]


def test_only_the_tokens_within_a_tokenizers_own_text_are_trimmed():
    source, target = np.array([0, 0, 1, 2, 3]), np.arange(5)
    placed = LocatedTokens(b" a b", source, target, np.array([0, 2]), np.array([2, 4]), np.array([True, True]))
    found = walks.located_walk(placed)
    assert (found.own, found.trimmed.tolist()) == (1, [1, 0])
    assert (found.begins.tolist(), found.ends.tolist()) == ([1, 2], [2, 4])


def test_a_text_that_begins_with_a_space_needs_no_other():
    pieces = [b" a", b"b", b" "]
    tables = [replace(table_of(pieces), prefix=prefix) for prefix in ("missing", "always")]
    sides = build_token_arrays(*tables, pieces, pieces)
    rows = FlatLayout(1, (2, 3))
    ids = np.array([0, 1, *(np.array([2, 0, 1]) + sides.offset)])
    none = np.zeros(0, dtype=np.int64)
    assert find_dummy_prefixes(sides, ids, rows, none).tolist() == [2], "the student's is the text's"
    ids = np.array([0, 1, *(np.array([0, 1, 1]) + sides.offset)])
    assert find_dummy_prefixes(sides, ids, rows, none).tolist() == [0, 2]


def test_a_row_that_continues_a_text_has_no_space_of_its_tokenizer():
    pieces = [b" a", b"b", b"  a"]
    tables = [replace(table_of(pieces), prefix=prefix) for prefix in ("always", "none")]
    sides = build_token_arrays(*tables, pieces, pieces)
    rows = FlatLayout(1, (2, 2))
    for student, teacher, found in (([0, 1], [0, 1], []), ([2, 1], [0, 1], [0]), ([0, 1], [1, 1], [0])):
        ids = np.array([*student, *(np.array(teacher) + sides.offset)])
        assert find_dummy_prefixes(sides, ids, rows, np.zeros(0, dtype=np.int64)).tolist() == found


def test_a_row_that_ends_inside_of_a_word_is_placed_by_the_model():
    tokenizer = v.wordpiece()
    table = token_table(tokenizer)
    text = "\U0001f600 antidisestablishment low"
    ids = np.array(tokenizer.encode(text, add_special_tokens=False))
    assert table.kinds[ids[0]] == UNKNOWN and len(ids) > 4
    pipeline = Pipeline(tokenizer, table)
    for size in range(2, len(ids) + 1):
        placed = pipeline.locate(ids[:size], text, cut=False)
        assert placed is not None, size
        assert not placed.known[0] and placed.known[1:].all()
        for n in range(1, size):
            assert placed.data[placed.begins[n] : placed.ends[n]] == table.pieces[ids[n]]
