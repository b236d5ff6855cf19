"""The core against brute force: every chunk equal, as many chunks as there can be."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.alignments import most_chunks, table_of
from tests.support.examples import examples
from xtoken_core.alignment.boundaries import find_chunks
from xtoken_core.alignment.token_arrays import build_token_arrays


def split(text: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({c % (len(text) + 1) for c in cuts} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(at)]


def run(rows: list[tuple[list[bytes], list[bytes]]], left: bool = False):
    """Align rows of spelled tokens; padding tokens have a spelling of their own and must not matter."""
    vocabularies = [sorted({piece for row in rows for piece in row[side]} | {b"padding"}) for side in (0, 1)]
    tables = [table_of(v) for v in vocabularies]
    sides = build_token_arrays(*tables, *vocabularies)
    arrays = []
    for side in (0, 1):
        index = {piece: i for i, piece in enumerate(vocabularies[side])}
        width = max(len(row[side]) for row in rows) + 1
        ids = np.full((len(rows), width), (sides.student, sides.teacher)[side].absent, dtype=np.int64)
        mask = np.zeros((len(rows), width), dtype=bool)
        for r, row in enumerate(rows):
            place = slice(width - len(row[side]), width) if left else slice(0, len(row[side]))
            ids[r, place], mask[r, place] = [index[p] for p in row[side]], True
        arrays.append((ids, mask))
    (s, s_mask), (t, t_mask) = arrays
    return find_chunks(sides, s, t), s_mask, t_mask


def with_specials(pieces: list[bytes], specials: dict[bytes, list[int]]) -> list[tuple[int, bytes]]:
    """The pieces with specials before some of them or at the end, each with the byte at which it begins."""
    row = []
    for n in range(len(pieces) + 1):
        begin = len(b"".join(pieces[:n]))
        row += [(begin, special) for special, places in specials.items() for p in places if p % (len(pieces) + 1) == n]
        row += [(begin, piece) for piece in pieces[n : n + 1]]
    return row


texts = st.binary(min_size=0, max_size=12) | st.text(max_size=6).map(lambda s: s.encode("utf-8", "surrogatepass"))
cuts = st.lists(st.integers(0, 40), max_size=8)
rows = st.lists(st.tuples(texts, cuts, cuts, st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=4)


@examples(37, 150)
@given(rows, st.booleans())
def test_as_many_equal_chunks_as_brute_force_finds(rows, left):
    given_rows = []
    for text, a, b, keep_a, keep_b in rows:
        student, teacher = split(text, a), split(text, b)
        given_rows.append((student[: len(student) - keep_a % 3], teacher[: len(teacher) - keep_b % 3]))
    found, s_mask, t_mask = run(given_rows, left)
    assert not found.unverified.any()
    for row, (student, teacher) in enumerate(given_rows):
        assert found.counts[row] == most_chunks(tuple(student), tuple(teacher))
        s_chunk, t_chunk = found.student_chunk[row][s_mask[row]], found.teacher_chunk[row][t_mask[row]]
        for n in range(found.counts[row]):
            ours = [p for p, c in zip(student, s_chunk, strict=True) if c == n]
            theirs = [p for p, c in zip(teacher, t_chunk, strict=True) if c == n]
            assert b"".join(ours) == b"".join(theirs) != b""
            exact = len(ours) == len(theirs) == 1
            assert found.student_exact[row][s_mask[row]][s_chunk == n].all() == exact
            assert found.teacher_exact[row][t_mask[row]][t_chunk == n].all() == exact
        assert (found.student_chunk[row][~s_mask[row]] == -1).all()


@examples(25, 100)
@given(texts, cuts, cuts, *[st.lists(st.integers(0, 12), max_size=4) for _ in range(3)])
def test_specials_pair_at_their_byte_and_shift_nothing(text, a, b, ours, theirs, alone):
    pieces = split(text, a), split(text, b)
    shared, own = b"<|both|>", b"<|one|>"  # specials, in the tables below, of both sides and of the student only
    rows = [with_specials(pieces[0], {shared: ours, own: alone}), with_specials(pieces[1], {shared: theirs})]
    vocabularies = [sorted({*side, shared, own}) for side in pieces]
    tables = [table_of(v, specials=(shared, own)[: 2 - side]) for side, v in enumerate(vocabularies)]
    spellings = [[b"" if p in (shared, own)[: 2 - side] else p for p in v] for side, v in enumerate(vocabularies)]
    ids = [np.array([[v.index(p) for _, p in row]]) for v, row in zip(vocabularies, rows, strict=True)]
    found = find_chunks(build_token_arrays(*tables, *spellings), *ids)
    places = [Counter(at for at, p in row if p == shared) for row in rows]
    pairs = sum((places[0] & places[1]).values())
    if ids[0].size and ids[1].size:
        assert not found.unverified.any()
        assert found.counts[0] == most_chunks(*map(tuple, pieces)) + pairs
        assert sum(c >= 0 for c, (_, p) in zip(found.student_chunk[0], rows[0], strict=True) if p == shared) == pairs
    assert all(c < 0 for c, (_, p) in zip(found.student_chunk[0], rows[0], strict=True) if p == own)


@examples(25, 100)
@given(st.lists(st.tuples(texts, texts, cuts, cuts), min_size=1, max_size=3))
def test_rows_that_differ_are_never_taken_for_equal(rows):
    found, _, _ = run([(split(x, a), split(y, b)) for x, y, a, b in rows])
    for row, (x, y, _, _) in enumerate(rows):
        shared = min(len(x), len(y))
        assert found.unverified[row] == (x[:shared] != y[:shared])


@pytest.mark.parametrize("tokens", [0, 1], ids=["no token", "one token"])
def test_the_smallest_rows(tokens):
    found, _, _ = run([([b"a"] * tokens, [b"a"] * tokens), ([], [b"b"])])
    assert found.counts.tolist() == [tokens, 0]
