"""The steps of building a projection, against their definitions written out in loops."""

from difflib import SequenceMatcher
from functools import cache

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.support import vocabularies as v
from tests.support.alignments import aligner_of
from xtoken_core.errors import ConfigError
from xtoken_core.projection import build
from xtoken_core.projection.build import BuildOptions, Entries, build_projection, cut_rows, similarity, special_entries
from xtoken_core.projection.exact_map import exact_token_map
from xtoken_core.projection.retokenize import Retokenizer

PAIRS = {
    "byte-level to sentencepiece": (v.byte_level, lambda: v.sentencepiece_bpe("legacy")),
    "sentencepiece to byte-level": (v.sentencepiece_bpe, lambda: v.byte_level(prefix_space=True)),
    "unigram to byte-level": (v.unigram, v.byte_level),
    "byte-level to unigram without an unknown token": (
        v.byte_level,
        lambda: v.unigram(byte_fallback=False, unknown=False),
    ),
    "unigram without an unknown token to byte-level": (
        lambda: v.unigram(byte_fallback=False, unknown=False),
        v.byte_level,
    ),
    "byte-level to slow sentencepiece": (v.byte_level, v.slow_sentencepiece),
    "byte-level to wordpiece": (v.byte_level, v.wordpiece),
}

built = cache(build_projection)


@pytest.fixture(scope="module", params=PAIRS, ids=str)
def pair(request):
    student, teacher = (maker() for maker in PAIRS[request.param])
    aligner = aligner_of(student, teacher)
    return student, teacher, aligner.student, aligner.teacher


def test_every_row_spells_its_token(pair):
    """Where the teacher can write a token in up to 4 pieces, the row holds those pieces, most weight first."""
    student, teacher, ours, theirs = pair
    projection = build_projection(student, teacher, BuildOptions(specials=False))
    pieces_of = Retokenizer(teacher, theirs)
    lowest = {piece: t for t, piece in reversed(list(enumerate(theirs.pieces))) if t not in theirs.unused_bytes}
    checked = 0
    for index in range(0, len(ours), len(ours) // 200):
        spelling = ours.pieces[index]
        row = [(t, w) for t, w in zip(projection.indices[index], projection.likelihoods[index], strict=True) if t >= 0]
        if not spelling or index in ours.unused_bytes:
            assert not spelling or not row
            continue
        if spelling in lowest:
            assert [(int(t), float(w)) for t, w in row] == [(lowest[spelling], 1.0)]
            continue
        ids, counts = pieces_of([spelling])
        assert len(ids) == counts[0]
        if not theirs.drops_whitespace and len(ids):
            assert theirs.spell(ids) == spelling
        expected: dict[int, float] = {}
        for place, piece in enumerate(ids[:4].tolist()):
            expected[piece] = expected.get(piece, 0.0) + 0.9 * 0.1**place
        total = sum(expected.values())
        found: dict[int, float] = {}
        for t, w in row:
            found[int(t)] = found.get(int(t), 0.0) + float(w)
        assert found == pytest.approx({t: w / total for t, w in expected.items()}, rel=1e-6)
        assert sorted((float(w) for _, w in row), reverse=True) == [float(w) for _, w in row]
        checked += len(ids) > 1
    assert checked


def test_a_character_is_pinned_to_the_token_that_is_written_for_it():
    """A vocabulary with byte fallback has two tokens for it, `<0x61>` with the lower id, and writes one of them."""
    student, teacher = v.byte_level(), v.sentencepiece_bpe("legacy")
    pieces_of = Retokenizer(teacher, aligner_of(student, teacher).teacher)
    forth, back = built(student, teacher), built(teacher, student)
    common = exact_token_map(back.indices, back.likelihoods, relaxed=False, teacher_vocab_size=len(student))
    for character in "a.,0 ":
        spare = teacher.convert_tokens_to_ids(f"<0x{ord(character):02X}>")
        ((written,), _) = pieces_of([character.encode()])
        assert spare < written and teacher.convert_ids_to_tokens(int(written)).replace("▁", " ") == character
        (own,) = student.encode(character, add_special_tokens=False)
        assert forth.indices[own].tolist() == [written, -1, -1, -1]
        assert back.indices[written].tolist() == [own, -1, -1, -1]
        assert back.indices[spare].tolist() == [-1] * 4
        assert written in common["common_student"] and spare not in common["common_student"]


def test_a_repeated_piece_is_no_equal_token():
    student, teacher = v.sentencepiece_bpe("legacy"), v.byte_level()
    projection = built(student, teacher)
    (one,) = teacher.encode("a", add_special_tokens=False)
    row = student.convert_tokens_to_ids("aaaa")
    assert projection.indices[row].tolist() == [one, one, -1, -1]
    assert projection.likelihoods[row].tolist() == pytest.approx([10 / 11, 1 / 11, 0.0, 0.0])
    for relaxed in (False, True):
        common = exact_token_map(
            projection.indices, projection.likelihoods, relaxed=relaxed, teacher_vocab_size=len(teacher)
        )
        paired = common["common_student"][common["common_teacher"] == one]
        assert student.convert_ids_to_tokens(paired.tolist()) == ["a"]


def test_bytes_that_no_other_token_spells_are_pinned():
    teacher = v.sentencepiece_bpe("legacy")
    student = v.byte_level()
    table = aligner_of(student, teacher).teacher
    assert len(table.byte_tokens) > 200 and 0 < len(table.unused_bytes) < len(table.byte_tokens)
    projection = built(student, teacher)
    own = next(i for i, piece in enumerate(aligner_of(student, teacher).student.pieces) if piece == b"\xe2")
    assert projection.indices[own].tolist() == [teacher.convert_tokens_to_ids("<0xE2>"), -1, -1, -1]


def test_the_same_tokenizers_give_the_same_projection(pair):
    student, teacher, _, _ = pair
    a, b = built(student, teacher), build_projection(student, teacher)
    assert torch.equal(a.indices, b.indices) and torch.equal(a.likelihoods, b.likelihoods)
    assert (a.student_fingerprint, a.teacher_fingerprint) == (b.student_fingerprint, b.teacher_fingerprint)


def test_a_tokenizer_projects_onto_itself_as_the_identity():
    tokenizer = v.byte_level()
    projection = build_projection(tokenizer, tokenizer)
    table = aligner_of(tokenizer, tokenizer).student
    lowest = {spelling: i for i, spelling in reversed(list(enumerate(table.pieces)))}
    for index, spelling in enumerate(table.pieces):
        assert projection.indices[index].tolist() == [lowest[spelling] if spelling else index, -1, -1, -1]
    assert projection.likelihoods.tolist() == [[1.0, 0.0, 0.0, 0.0]] * len(table)


def test_reverse_adds_teacher_tokens_to_the_pieces_of_their_spelling():
    student, teacher = v.byte_level(300), v.byte_level(600)
    aligner = aligner_of(student, teacher)
    entries = build.reverse_entries(aligner.teacher, Retokenizer(student, aligner.student))
    word = next(i for i, piece in enumerate(aligner.teacher.pieces) if piece == b" newest")
    mine = {int(s): w for s, t, w in zip(entries.student, entries.teacher, entries.weight, strict=True) if t == word}
    ids = student.encode(" newest")
    expected: dict[int, float] = {}
    total = sum(0.9 * 0.1**n for n in range(min(len(ids), 4)))
    for place, index in enumerate(ids[:4]):
        expected[index] = expected.get(index, 0) + 0.9 * 0.1**place / total
    assert mine == pytest.approx(expected)


def test_both_ends_and_specials_of_one_name_are_pinned():
    student, teacher = v.byte_level(), v.sentencepiece_bpe()
    projection = built(student, teacher)
    assert projection.indices[student.eos_token_id].tolist() == [teacher.eos_token_id, -1, -1, -1]
    back = built(teacher, student)
    for index in (teacher.bos_token_id, teacher.eos_token_id):
        assert back.indices[index].tolist() == [student.eos_token_id, -1, -1, -1]


def with_specials(base, *names):
    tokenizer = v.fast(Tokenizer.from_str(base.backend_tokenizer.to_str()), eos_token=base.eos_token)
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    return tokenizer


@pytest.mark.parametrize("specials", [True, False])
def test_specials_of_similar_names_are_paired_as_asked(specials):
    student = with_specials(v.characters(), "<|start_of_turn|>")
    teacher = with_specials(v.byte_level(), "<start_of_turn>")
    projection = build_projection(student, teacher, BuildOptions(forward=False, specials=specials))
    row = projection.indices[student.convert_tokens_to_ids("<|start_of_turn|>")]
    assert (teacher.convert_tokens_to_ids("<start_of_turn>") in row.tolist()) is specials


@pytest.mark.parametrize("as_reference", [False, True], ids=["own", "as reference"])
def test_specials_of_similar_names_are_paired_as_reference_only(as_reference):
    """Of one entry a row's normalised weight is 1, however little the names are alike."""
    student = with_specials(v.byte_level(), "<empty_output>", "<gh_stars>", "<jupyter_start>")
    teacher = with_specials(v.sentencepiece_bpe(), "<start_of_turn>", "<end_of_turn>", "<mask>")
    projection = build_projection(student, teacher, BuildOptions(as_reference=as_reference, top_k=1))
    rows = {
        name: [teacher.convert_ids_to_tokens(int(t)) for t in projection.indices[student.convert_tokens_to_ids(name)]]
        for name in ("<empty_output>", "<gh_stars>")
        if projection.likelihoods[student.convert_tokens_to_ids(name), 0] == 1
    }
    assert rows == ({"<empty_output>": ["<end_of_turn>"], "<gh_stars>": ["<mask>"]} if as_reference else {})
    empty = projection.likelihoods[student.convert_tokens_to_ids("<jupyter_start>")].sum() == 0
    assert bool(empty) is not as_reference


def test_specials_of_one_meaning_are_pinned():
    ours = ["<|im_start|>", "<|im_end|>", "[PAD]", "<|Tool_Call|>", "<a>", "<|eot_id|>"]
    theirs = ["<start_of_turn>", "<end_of_turn>", "<pad>", "<tool_call>", "<b>", "<eot>"]
    student, teacher = with_specials(v.byte_level(), *ours), with_specials(v.sentencepiece_bpe(), *theirs)
    projection = build_projection(student, teacher)
    found = {
        name: teacher.convert_ids_to_tokens(int(projection.indices[student.convert_tokens_to_ids(name), 0]))
        for name in ours
        if projection.likelihoods[student.convert_tokens_to_ids(name)].tolist() == [1, 0, 0, 0]
    }
    assert found == {**dict(zip(ours[:4], theirs[:4], strict=True)), "<|eot_id|>": "<end_of_turn>"}
    without = build_projection(student, teacher, BuildOptions(specials=False))
    assert int(without.likelihoods[student.convert_tokens_to_ids("<|im_end|>")].sum()) == 0


def test_a_special_that_is_pinned_has_no_other_partner():
    student = with_specials(v.byte_level(), "<|im_end|>", "<end_of_turn>")
    teacher = with_specials(v.sentencepiece_bpe(), "<end_of_turn>")
    projection = build_projection(student, teacher)
    rows = [projection.indices[student.convert_tokens_to_ids(name), 0] for name in ("<|im_end|>", "<end_of_turn>")]
    assert [int(row) for row in rows] == [-1, teacher.convert_tokens_to_ids("<end_of_turn>")]


def test_specials_by_likeness():
    ours = {0: b"<|start_header_id|>", 1: b"<0x0A>", 2: b"[PAD]", 3: b"<|end_of_text|>"}
    theirs = {7: b"<start_of_turn>", 8: b"<|endoftext|>", 9: b"<0x0A>", 10: b"<q>"}
    students, teachers, weights = special_entries(ours, theirs)
    expected = {}
    for s in (0, 3):
        for t in (7, 8, 10):
            a, b = ours[s].decode(), theirs[t].decode()
            words = [{w for w in "".join(c if c.isalpha() else " " for c in x).split() if len(w) > 2} for x in (a, b)]
            jaccard = len(words[0] & words[1]) / max(len(words[0] | words[1]), 1)
            value = 0.6 * SequenceMatcher(None, b, a, autojunk=False).ratio() + 0.4 * jaccard
            if value >= 0.3:
                expected[s, t] = 0.8 * value
    found = {(int(s), int(t)): w for s, t, w in zip(students, teachers, weights, strict=True)}
    assert found == pytest.approx(expected) and len(found) == 2
    assert similarity("<pad>", "<pad>") == pytest.approx(1.0)


def test_the_best_32_specials_are_kept_and_no_more():
    theirs = {n: f"<|reserved_{n}|>".encode() for n in range(50)}
    students, _, weights = special_entries({0: b"<|reserved_7|>"}, theirs)
    assert len(students) == 32
    everything = sorted((0.8 * _likeness("<|reserved_7|>", name.decode()) for name in theirs.values()), reverse=True)
    assert sorted(weights, reverse=True) == pytest.approx(everything[:32])


def _likeness(a, b):
    return 0.6 * SequenceMatcher(None, b, a, autojunk=False).ratio() + 0.4 * 1.0


def test_rows_are_cut_and_normalised_again():
    weights = np.linspace(1.0, 0.1, 40)
    entries = Entries(np.zeros(40, dtype=np.int64), np.arange(40)[::-1].copy(), weights)
    none = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    indices, cut = cut_rows(Entries.join(entries), 2, none, BuildOptions(top_k=3))
    assert indices.tolist() == [[39, 38, 37], [-1, -1, -1]]
    assert cut[0] == pytest.approx(weights[:3] / weights[:3].sum())
    assert cut[1].tolist() == [0.0, 0.0, 0.0]


def test_equal_weights_are_ordered_by_id():
    entries = Entries(np.zeros(4, dtype=np.int64), np.array([9, 3, 7, 1]), np.ones(4))
    none = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    assert cut_rows(Entries.join(entries), 1, none, BuildOptions(top_k=2))[0].tolist() == [[1, 3]]


def test_as_reference_keeps_a_last_slot_of_a_fifth():
    student, teacher = v.unigram(), v.byte_level(300)
    ours = build_projection(student, teacher)
    reference = build_projection(student, teacher, BuildOptions(as_reference=True))
    spread = (reference.indices[:, 1] >= 0) & (reference.likelihoods.sum(dim=1) > 0)
    assert int(spread.sum()) > 50
    assert bool((reference.likelihoods[spread, -1] >= 0.15).all())
    assert bool((ours.likelihoods[spread, -1] < 0.01).all())


def test_a_wider_head_has_empty_rows():
    tokenizer = v.byte_level(300)
    rows = len(tokenizer) + 5
    projection = build_projection(tokenizer, tokenizer, student_rows=rows)
    assert projection.indices.shape == (rows, 4)
    assert projection.indices[-5:].tolist() == [[-1] * 4] * 5
    with pytest.raises(ConfigError, match="student_rows"):
        build_projection(tokenizer, tokenizer, student_rows=3)


@pytest.mark.parametrize("top_k", [0, 33])
def test_an_impossible_top_k_is_refused(top_k):
    with pytest.raises(ConfigError, match="top_k"):
        build_projection(v.byte_level(), v.byte_level(), BuildOptions(top_k=top_k))


def test_a_teacher_special_is_text_inside_a_student_token():
    """A text token may spell `</s>`; the teacher must spell it too, not read it as its eos."""
    teacher = v.sentencepiece_bpe()
    table = aligner_of(v.byte_level(), teacher).teacher
    ids, _ = Retokenizer(teacher, table)([b"</s>", b"\xf0\x9f", b" a"])
    assert table.spell(ids) == b"</s>\xf0\x9f a"
    assert teacher.eos_token_id not in ids
