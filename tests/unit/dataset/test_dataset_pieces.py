"""Long documents divided into records: where pieces end, which records there are, how a collator closes them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import vocabularies as v
from tests.support.alignments import collator_of, spelled
from tests.support.columns import rows_of
from tests.support.examples import examples
from xtoken_core.dataset import BadRecord, DataIndex, JoinedIndex, PieceIndex, Record
from xtoken_core.dataset.pieces import divide
from xtoken_core.dataset.records import PIECE, Piece
from xtoken_core.tokenizing import TextTokenizer, UnspellableError
from xtoken_services.common.text.piece_bytes import piece_bytes

LONG = "".join(f"line {n} of a text, naïve 日本 👍🏽\n" for n in range(40))
LIMIT = 100


def pieces_of(directory: Path, records: list[Any], limit: int = LIMIT) -> PieceIndex:
    file = directory / "data.jsonl"
    if not file.exists():
        file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    documents = DataIndex.build([file], field="text", cache_dir=directory / "cache")
    return PieceIndex.build(documents, limit, cache_dir=directory / "cache")


@given(text=st.text(alphabet="ab \n\té日👍", max_size=200), limit=st.integers(4, 40))
@examples(75, 300)
def test_pieces_cover_a_text_in_order(text: str, limit: int) -> None:
    raw = text.encode()
    at = 0
    for begin, end in divide(raw, limit):
        assert at <= begin < end <= begin + limit
        assert not raw[at:begin].strip()
        assert raw[begin:end].decode().strip()
        at = end
    assert not raw[at:].strip()


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("short", ["short"]),
        ("first line\nsecond line", ["first line\n", "second line"]),
        ("several words here", ["several", " words here"]),
        ("a\nbcdefghijklmnopqr", ["a\nbcdefghijk", "lmnopqr"]),
        ("日本語の文章", ["日本語の", "文章"]),
        ("words" + 30 * " " + "more", ["words       ", " more"]),
    ],
)
def test_pieces_end_at_lines_then_words_then_characters(text: str, pieces: list[str]) -> None:
    raw = text.encode()
    assert [raw[begin:end].decode() for begin, end in divide(raw, 12)] == pieces


def test_every_record_has_a_number_and_a_location(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "assistant", "content": LONG}]}
    records = [{"text": "short"}, {"text": LONG}, {"other": 1}, chat, {"text": "end"}]
    index = pieces_of(tmp_path, records)
    found = index.read(range(len(index)))
    texts = [record.value.get("text") for record in found if isinstance(record, Record)]
    assert texts[0] == "short"
    assert "".join(texts[1:-2]) == LONG
    assert texts[-2:] == [None, "end"]
    (bad,) = (record for record in found if isinstance(record, BadRecord))
    assert bad.location == index.location(bad.number) == f"{tmp_path / 'data.jsonl'}:3"
    flags = [record.value[PIECE] for record in found if isinstance(record, Record) and PIECE in record.value]
    assert flags[0] == Piece(first=True, last=False)
    assert flags[-1] == Piece(first=False, last=True)
    assert set(flags[1:-1]) == {Piece(first=False, last=False)}
    assert index.location(2).startswith(f"{tmp_path / 'data.jsonl'}:2, bytes {len(texts[1].encode())} to ")
    assert index.divided == 1


def test_pieces_are_found_again_and_belong_to_their_limit(tmp_path: Path) -> None:
    index, again = (pieces_of(tmp_path, [{"text": LONG}]) for _ in range(2))
    assert (index.fingerprint, len(index)) == (again.fingerprint, len(again))
    assert [r.value for r in index.read([3, 1])] == [r.value for r in again.read([3, 1])]
    other = pieces_of(tmp_path, [], limit=2 * LIMIT)
    assert other.fingerprint != index.fingerprint
    assert len(other) < len(index)
    with pytest.raises(IndexError):
        index.read([len(index)])


def test_pieces_of_several_texts_are_numbered_as_one(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = (
        pieces_of(tmp_path / "one", [{"text": LONG}]),
        pieces_of(tmp_path / "two", [{"text": "a"}, {"text": LONG}]),
    )
    joined = JoinedIndex([one, two])
    assert len(joined) == len(one) + len(two) == 2 * len(one) + 1
    numbers = [len(one) - 1, len(one), len(one) + 1]
    records = joined.read(numbers)
    assert [record.number for record in records] == numbers
    assert isinstance(records[0], Record)
    assert records[0].value[PIECE] == Piece(first=False, last=True)
    assert joined.location(numbers[2]).startswith(f"{tmp_path / 'two' / 'data.jsonl'}:2, bytes 0 to ")


@pytest.mark.parametrize(
    ("student", "adds_bos"),
    [(v.sentencepiece_bpe("legacy"), True), (v.byte_level(bos=True), True), (v.byte_level(), False)],
    ids=["spaces", "bytes", "no-bos"],
)
def test_every_piece_begins_as_a_text_and_the_last_one_ends_as_one(student: Any, adds_bos: bool) -> None:
    teacher = v.byte_level(bos=True)
    table = TextTokenizer(student, "student").table
    collator = collator_of(student, teacher, 400, 400)
    words = LONG.replace("\n", " ")
    for text in (LONG, words):
        raw = text.encode()
        spans = divide(raw, LIMIT)
        parts = [raw[begin:end].decode() for begin, end in spans]
        ends = range(len(parts))
        values = [{"text": part, PIECE: Piece(n == 0, n == ends[-1])} for n, part in zip(ends, parts, strict=True)]
        rows = rows_of(collator.rows(values).columns)
        for number, row in enumerate(rows):
            last = number == len(rows) - 1
            for ids, tokenizer in ((row["input_ids"], student), (row["teacher_0_input_ids"], teacher)):
                assert (int(ids[0]) == tokenizer.bos_token_id) == (adds_bos or tokenizer is teacher)
                assert (int(ids[-1]) == tokenizer.eos_token_id) == last
            dummy = b" " if number == 0 and table.prefix != "none" else b""
            assert (
                spelled(table, row["input_ids"][int(adds_bos) : -1 if last else None]) == dummy + parts[number].encode()
            )
            assert row["alignment_0_pair_is_correct"].all()
            assert not row["truncated"]


def test_pieces_fit_the_context_that_they_were_measured_for() -> None:
    side = TextTokenizer(v.byte_level(bos=True), "student")
    texts = [LONG, "x = [1, 2, 3]\n" * 200, "short"]
    limit = piece_bytes(side, 32, texts)
    parts = [raw[begin:end].decode() for raw in map(str.encode, texts) for begin, end in divide(raw, limit)]
    lengths = [len(ids) for ids in side.encode(parts, specials=True)]
    assert sum(length < 32 for length in lengths) >= 0.97 * len(lengths)
    assert max(lengths) > 20


def test_texts_without_tokens_are_not_measured() -> None:
    side = TextTokenizer(v.unigram(byte_fallback=False, unknown=False), "teacher")
    assert piece_bytes(side, 32, ["hello there", "hello Ω"]) == piece_bytes(side, 32, ["hello there"])
    with pytest.raises(UnspellableError, match="the teacher's tokenizer has no token for 'Ω'"):
        piece_bytes(side, 32, ["hello Ω"])
