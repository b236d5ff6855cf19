"""Parts of an alignment, each alone: streams, specials, spellings, traces of normalizers, counts.

Steps of the alignment of one row, each alone: streams, their cuts, and tokens placed on a text.

Transport names of an alignment, and stretches that two byte streams have in common.
"""

import re
from dataclasses import fields, replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from tests.support import vocabularies as v
from tests.support.alignments import padded, table_of
from tests.support.cases import cases
from tests.support.examples import examples
from tests.unit.alignment.test_boundaries import run
from xtoken_core import schema
from xtoken_core.alignment import (
    AlignmentBatch,
    TokenAligner,
    alignment_from_flat_batch,
    slow_path,
    token_decoders,
    walks,
)
from xtoken_core.alignment.check import _unmatched
from xtoken_core.alignment.flat_layout import FlatLayout
from xtoken_core.alignment.hashing import prefix_hashes, without_space
from xtoken_core.alignment.normalizer import Normalizer, Step, clusters
from xtoken_core.alignment.pipeline import LocatedTokens, Pipeline, _inside_characters
from xtoken_core.alignment.prefix_space import find_dummy_prefixes
from xtoken_core.alignment.report import Encoder, ShownToken, plain_chunks, summarize
from xtoken_core.alignment.specials import match_specials
from xtoken_core.alignment.tables import UNKNOWN, spelling_pool, token_table
from xtoken_core.alignment.token_arrays import ABSENT, build_token_arrays, is_ended
from xtoken_core.alignment.walks import matching_blocks
from xtoken_core.errors import InputError

NOTHING = 256
"""The symbol of an unknown token."""


def stream(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("latin-1"), dtype=np.uint8).astype(np.uint16)


def words(*vocabulary: str, normalizer: normalizers.Normalizer | None = None):
    """A tokenizer of words with spaces before them, `</s>` at the end of a text."""
    vocab = {word: i for i, word in enumerate(["<unk>", "</s>", *vocabulary])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return v.fast(tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="</s>")


@cases(
    "a, b, blocks",
    ("a", "b", []),
    ("abXcdefZgh", "abYcdefWij", [(0, 0, 2), (3, 3, 4)]),
    ("ab123cX", "ab890cY", [(0, 0, 2)]),
    ("abXcd", "abcd", [(0, 0, 2), (3, 2, 2)]),
    ids=["nothing", "four in the middle", "one symbol is not enough", "the end"],
)
def test_stretches_in_common(a, b, blocks):
    assert matching_blocks(stream(a), stream(b)) == blocks


def test_specials_in_another_order_keep_the_longest_run():
    ours, theirs = match_specials(np.array([10, 11, 12, 13, 14]), np.array([10, 13, 11, 12, 14]))
    assert (ours.tolist(), theirs.tolist()) == ([0, 1, 2, 4], [0, 2, 3, 4])


def test_literals_lie_behind_the_pieces():
    literals = {1: b"<s>", 2: b"</s>"}
    pool = spelling_pool([b"ab", b"", b"", b"c"], literals)
    ends = pool.literal_ends
    for index, literal in literals.items():
        assert bytes(pool.data[ends[index] - len(literal) : ends[index]]) == literal
    assert (ends[0], ends[3]) == (2, 3)


@pytest.mark.parametrize(("token", "spelled"), [("##ing", b"ing"), ("##", b"##"), ("a##b", b"a##b")])
def test_word_pieces(token, spelled):
    assert token_decoders.wordpiece(token) == spelled


@pytest.mark.parametrize(("model", "scheme"), [("WordPiece", "wordpiece"), ("BPE", "plain")])
def test_the_pipeline_decides_between_equals(model, scheme):
    chosen = token_decoders.choose([token_decoders.Probe("hello", ["hello"])], {"model": {"type": model}})
    assert chosen is getattr(token_decoders, scheme)


@pytest.mark.parametrize(
    ("tokens", "likeness"), [(["a", " b"], 1.0), ([" a", " b"], 0.9), (["a", "b"], 0.7), (["A", "b"], 0.5), (["c"], 0)]
)
def test_likeness_to_a_text(tokens, likeness):
    assert token_decoders._likeness(token_decoders.plain, token_decoders.Probe("a b", tokens)) == likeness


def test_the_printable_bytes_stand_for_themselves():
    alphabet = token_decoders.byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["a"], alphabet["Ġ"]) == (ord("a"), ord(" "))


def test_a_hash_without_its_space():
    data = np.frombuffer(b" ab" + b"ab", dtype=np.uint8)
    hashes = prefix_hashes(data, np.array([3, 2]))
    assert without_space(hashes[2:3]) == hashes[4:5]


def test_tokens_behind_the_shorter_side_are_in_no_chunk():
    found, _, _ = run([([b"ab", b"c", b"de"], [b"ab"]), ([b"a"], [b"a", b"bc", b"d"]), ([b"x"], [b"x"])])
    assert found.counts.tolist() == [1, 1, 1]
    assert found.student_chunk.tolist() == [[0, -1, -1, -1], [0, -1, -1, -1], [0, -1, -1, -1]]
    assert found.teacher_chunk.tolist() == [[0, -1, -1, -1], [0, -1, -1, -1], [0, -1, -1, -1]]


def test_the_absent_tokens_of_both_sides():
    pieces = [[b"a", b"b"], [b"a", b"b", b"c"]]
    sides = build_token_arrays(*map(table_of, pieces), *pieces)
    assert np.flatnonzero(sides.kinds == ABSENT).tolist() == list(sides.absent) == [2, 6]


def test_rows_that_are_ended():
    aligner = TokenAligner(words(" a", "a"), words(" a", "a"))
    side = aligner._sides.student
    rows = np.array([[2, 1, side.absent], [2, 2, 3], [1, 2, side.absent], [2, 2, 1]])
    assert is_ended(side, rows).tolist() == [True, False, False, True]
    assert is_ended(side, rows[:, :0]).tolist() == [False] * 4


def test_ids_of_masked_positions_are_not_read():
    aligner = TokenAligner(words(" a", "a"), words(" a", "a"))
    ids, mask = torch.tensor([[3, 2, -100], [3, 99, 99]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    batch = aligner.align(ids, ids, student_attention_mask=mask, teacher_attention_mask=mask)
    assert batch.student_chunk_id.tolist() == [[0, 1, -1], [0, -1, -1]]
    for masked in (torch.ones_like(mask), None):
        with pytest.raises(InputError, match="student's ids hold"):
            aligner.align(ids, ids, student_attention_mask=masked, teacher_attention_mask=mask)


def test_a_side_without_positions_has_no_chunks():
    edited = words("a", normalizer=normalizers.Replace("b", "cc"))
    aligner = TokenAligner(words("a"), edited)
    ids, none = torch.tensor([[2, 2]]), torch.zeros(1, 0, dtype=torch.int64)
    for student, teacher in ((ids, none), (none, ids), (none, none)):
        batch = aligner.align(student, teacher, student_attention_mask=None, teacher_attention_mask=None)
        assert batch.num_chunks.tolist() == [0]


class Spaced(Encoder):
    """A tokenizer that puts a space before a text, and one token before and behind it."""

    @property
    def table(self):
        return replace(table_of([b"", b"", b"", b" ", b"", b"a", b"b", b"c"]), prefix="always")

    @property
    def ends(self):
        return [1], [2]

    def encode(self, texts, *, specials):
        raise NotImplementedError


@cases(
    "ids, chunk, truncated, unmatched",
    ([1, 5, 6, 2], [-1, 0, 1, -1], False, 0),
    ([1, 5, 6, 7], [-1, 0, 1, -1], False, 1),
    ([5, 6, 7, 2], [-1, 0, -1, -1], False, 2),
    ([1, 3, 6, 2], [-1, -1, 0, -1], False, 0),
    ([1, 5, 6, 7], [-1, 0, 1, -1], True, 0),
    ([1, 5, 6, 7], [-1, -1, 1, -1], True, 1),
    ids=["ends", "no end", "no beginning", "a space alone", "cut", "cut, one before"],
)
def test_unmatched_tokens(ids, chunk, truncated, unmatched):
    assert _unmatched(Spaced(), np.array(ids), np.array(chunk), truncated=truncated) == unmatched


def test_counts_of_a_batch():
    tokenizer = words("a", " a", " b")
    ids, mask = padded([[2, 3, 1], [2]], pad=1)
    aligner = TokenAligner(tokenizer, tokenizer)
    others, other_mask = padded([[2, 3, 1], [2, 4]], pad=1)
    batch = aligner.align(ids, others, student_attention_mask=mask, teacher_attention_mask=other_mask)
    batch.pair_is_correct[0, 1] = False
    report = summarize(aligner, batch, ids, mask, other_mask)
    assert (report.student_tokens, report.teacher_tokens) == (4, 5)
    assert (report.chunks, report.correct_chunks, report.incorrect_chunks, report.exact_chunks) == (4, 3, 1, 4)
    assert (report.special_pairs, report.unchunked_student_tokens, report.unchunked_teacher_tokens) == (1, 0, 1)
    masked = summarize(aligner, batch, ids, torch.zeros_like(mask), other_mask)
    assert (masked.special_pairs, masked.unchunked_student_tokens) == (0, 0)


def test_lines_of_chunks():
    right, wrong = ShownToken("a", 0, True), ShownToken("b", 1, False)
    assert plain_chunks([right, wrong], [right, wrong]) == ["a\ta", "b\tb\tthe two sides differ"]
    assert plain_chunks([right, wrong], [right]) == ["a\ta", "b\t\tthe two sides differ"]


def test_a_prefix_is_traced():
    trace = Step("Prepend", '{"prepend": "▁"}', lambda text: "▁" + text).trace("ab")
    assert (trace.source.tolist(), trace.target.tolist()) == ([0, 0, 1, 2], [0, 1, 2, 3])


def test_a_step_is_split_near_the_middle():
    step = Step("Other", "{}", lambda text: re.sub("a+b", "X", text))
    trace = step.trace("a" * 30 + "b" + "c" * 30)
    assert trace.text == "X" + "c" * 30
    assert trace.source.tolist() == [0, *range(31, 62)]


def test_a_text_that_no_step_edits():
    step = Step("Replace", '{"pattern": {"String": "foo"}, "content": "bar"}', lambda text: text.replace("foo", "bar"))
    assert Normalizer((step,)).is_unchanged("plain") and not Normalizer((step,)).is_unchanged("a foo")
    assert Normalizer((step,)).edits and not Normalizer(()).edits


@cases(
    "text, parts",
    ("aé", ["a", "é"]),
    ("e\u0301x", ["e\u0301", "x"]),
    ("\u0915\u0903\u0915", ["\u0915\u0903", "\u0915"]),
    ("+×", ["+", "×"]),
    ids=["letters", "accent", "spacing mark", "signs"],
)
def test_clusters(text, parts):
    assert clusters().findall(text) == parts


def test_the_image_of_one_character_ends_nowhere_before():
    tokenizer = v.byte_level(300)
    pipeline = Pipeline(tokenizer, token_table(tokenizer))
    assert [pipeline.normalized(text).last for text in ("a", "ab", "abc")] == [0, 1, 2]


def test_bytes_inside_of_a_character():
    source, target = np.array([0, 1, 2]), np.array([0, 1, 3])
    places = _inside_characters("aé", np.array([0, 1, 3]), source, target, "aé".encode())
    assert [part.tolist() for part in places] == [[2], [2]]
    assert [part.tolist() for part in _inside_characters("aé", np.array([0, 1, 3]), source, target, b"abc")] == [[], []]


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


@cases(
    "x, y, cuts",
    (("ab", "c", "x"), ("ab", "d", "x"), [(2, 2, True), (3, 3, False), (4, 4, False)]),
    (("A", "12345678", "!"), ("B", "12345678", "?"), [(1, 1, False), (9, 9, True)]),
    (("A", "1234567", "!"), ("B", "1234567", "?"), [(1, 1, False), (8, 8, False)]),
    (("A", "12345678", "12345678"), ("B", "12345678", "?"), [(1, 1, False), (9, 9, False)]),
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


@pytest.fixture(scope="module")
def batch():
    tokenizer = v.byte_level()
    ids, mask = padded([tokenizer.encode("hello world"), tokenizer.encode("a")])
    return TokenAligner(tokenizer, tokenizer).align(ids, ids, student_attention_mask=mask, teacher_attention_mask=mask)


@pytest.mark.parametrize("teacher", [None, 0, 2])
def test_flat_fields_are_the_schemas_and_come_back(batch, teacher):
    flat = batch.flat(teacher)
    assert set(flat) == {schema.field_name(field, teacher) for field in schema.ALIGNMENT_FIELDS}
    for field in schema.ALIGNMENT_FIELDS:
        assert str(flat[schema.field_name(field, teacher)].dtype) == f"torch.{field.dtype}"
    again = alignment_from_flat_batch({**flat, "other": 1}, teacher)
    assert all(torch.equal(getattr(again, f.name), getattr(batch, f.name)) for f in fields(AlignmentBatch))


def test_a_missing_field_is_named(batch):
    flat = batch.flat()
    del flat["alignment_num_chunks"]
    with pytest.raises(KeyError, match="alignment_num_chunks"):
        alignment_from_flat_batch(flat)


@examples(50, 200)
@given(
    st.binary(max_size=60),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5), st.binary(max_size=4)), max_size=3),
)
def test_blocks_are_equal_and_in_order(text, edits):
    other = bytearray(text)
    for at, removed, added in edits:
        other[at : at + removed] = added
    a, b = (np.frombuffer(bytes(x), dtype=np.uint8).astype(np.uint16) for x in (text, other))
    end_a = end_b = 0
    for i, j, size in matching_blocks(a, b):
        assert size > 0 and i >= end_a and j >= end_b
        assert np.array_equal(a[i : i + size], b[j : j + size])
        end_a, end_b = i + size, j + size
    if not edits:
        assert end_a == len(a)


def test_unknown_symbols_equal_nothing():
    a = np.array([1, 2, 300, 3, 4, 5, 6, 300], dtype=np.uint16)
    assert matching_blocks(a, a.copy()) == [(0, 0, 2), (3, 3, 4)]
