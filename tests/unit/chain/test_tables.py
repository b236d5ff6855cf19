"""Tables: tokenizer families, real vocabularies, what tokenizing pairs says, files."""

import logging
import random

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import BertGenerationTokenizer

from tests.support import vocabularies
from tests.support.live_sets import live_rows
from tests.unit.chain.chain_loops import Pair
from tests.unit.chain.test_divergence import ALPHABET, CHARACTERS, NUMERALS
from tests.unit.chain.tiny_tokenizers import PATTERNS, TinyTokenizer, split_words
from xtoken_core.alignment import token_table
from xtoken_core.chain.build import as_tensors, build_tables, cached_tables
from xtoken_core.chain.files import write_tables
from xtoken_core.chain.models import is_unigram
from xtoken_core.chain.spelling import NO_TEXT, UNKNOWN
from xtoken_core.ops.chain.live import live_mask
from xtoken_core.projection.retokenize import Retokenizer

FAMILIES = {
    "byte-level": vocabularies.byte_level,
    "sentencepiece": vocabularies.sentencepiece_bpe,
    "unigram": vocabularies.unigram,
    "nfkc": lambda: vocabularies.unigram(nfkc=True),
    "wordpiece": vocabularies.wordpiece,
    "lower case": lambda: vocabularies.wordpiece(lowercase=True),
    "characters": vocabularies.characters,
    "bytes": vocabularies.byte_tokenizer,
}


def random_tokenizer(rng):
    pattern = rng.choice(sorted(PATTERNS))
    corpus = "".join(rng.choice(rng.choice([CHARACTERS, NUMERALS])) for _ in range(30))
    words = [[word[i : i + 1] for i in range(len(word))] for word in split_words(corpus, pattern)]
    merges = []
    for _ in range(rng.randint(0, 12)):
        if not (long := [word for word in words if len(word) > 1]):
            break
        parts = rng.choice(long)
        at = rng.randrange(len(parts) - 1)
        merges.append((parts[at], parts[at + 1]))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return TinyTokenizer(ALPHABET, merges, pattern)


@pytest.mark.parametrize("seed", range(20))
def test_live_sets_equal_tokenizing_all_pairs(seed):
    rng = random.Random(seed)
    sides = random_tokenizer(rng), random_tokenizer(rng)
    pair, built = Pair(*sides), build_tables(*(side.fast for side in sides))
    if pair.identical:
        return
    tables = as_tensors(built)
    for k, (part, table) in enumerate(((built.student, tables.student), (built.teacher, tables.teacher))):
        after = range(len(sides[1 - k].vocab))
        expected = np.array([[x in pair.live(k, w) for x in range(len(sides[k].vocab))] for w in after])
        assert np.array_equal(live_rows(part.live, after), expected)
        assert np.array_equal(live_mask(table.live, torch.arange(len(after))).numpy(), expected)


@pytest.mark.parametrize("teacher", sorted(FAMILIES))
@pytest.mark.parametrize("student", ["unigram", "wordpiece"])
def test_every_family_has_roots_and_spellings(student, teacher, monkeypatch):
    monkeypatch.setattr("xtoken_core.chain.live_sets.MOST_PAIRS", 20_000)
    tokenizers = FAMILIES[student](), FAMILIES[teacher]()
    built = build_tables(*tokenizers)
    assert built.roots.common >= 15
    for part, roots in ((built.student, built.roots.student), (built.teacher, built.roots.teacher)):
        rooted = roots < built.roots.count
        assert (part.spelled.count[rooted] > 0).sum() + 8 >= rooted.sum()  # all others are specials
        assert not rooted[part.spelled.status == UNKNOWN].any()


@pytest.fixture(scope="module")
def two_families():
    return build_tables(vocabularies.byte_level(), vocabularies.sentencepiece_bpe())


def test_spellings_have_the_bytes_of_their_token(two_families):
    tables = token_table(vocabularies.byte_level()), token_table(vocabularies.sentencepiece_bpe())
    for part, own, other in zip((two_families.student, two_families.teacher), tables, tables[::-1], strict=True):
        for token in range(0, len(own), 17):
            pieces = part.spelled.piece[part.spelled.start[token] : part.spelled.start[token + 1]]
            assert part.spelled.status[token] == NO_TEXT or other.spell(pieces) == own.pieces[token]


def test_only_unigram_tokens_have_no_end_terms(monkeypatch):
    monkeypatch.setattr("xtoken_core.chain.live_sets.MOST_PAIRS", 10)
    built = build_tables(vocabularies.unigram(), vocabularies.byte_level())
    at_end = [
        side.paths.node[side.spelled.start[1:][side.spelled.count > 0] - 1] for side in (built.student, built.teacher)
    ]
    assert (at_end[0] == -1).all()
    assert (at_end[1] >= 0).any()
    assert (built.student.paths.node >= 0).any()


@pytest.mark.parametrize(
    ("make", "unigram"), [("unigram", True), ("byte_level", False), ("wordpiece", False), ("slow_sentencepiece", False)]
)
def test_unigram_is_recognized(make, unigram):
    assert is_unigram(getattr(vocabularies, make)()) == unigram


def test_slow_unigram_is_recognized(tmp_path):
    model = tmp_path / "unigram.model"
    model.write_bytes(vocabularies._trained_unigram(True, "identity").serialized_model_proto())
    assert is_unigram(BertGenerationTokenizer(vocab_file=str(model), eos_token="</s>", unk_token="<unk>"))


def test_parts_of_characters_have_roots(two_families):
    built = two_families
    table = token_table(vocabularies.byte_level())
    broken = [i for i, piece in enumerate(table.pieces) if piece[:1] >= b"\x80"]
    assert broken
    assert (built.roots.student[broken] < built.roots.count).all()


def test_tekken_merges_parts_of_characters():
    tokenizer = vocabularies.mistral_tekken()
    table = token_table(tokenizer)
    broken = [i for i, piece in enumerate(table.pieces) if not is_text(piece)]
    writer = Retokenizer(tokenizer, table)
    assert len(broken) > 1000
    assert writer([table.pieces[i] for i in broken])[0].tolist() == broken
    ids, counts = writer([b" caf\xc3", b"\x80\x93 x"])
    assert table.spell(ids) == b" caf\xc3\x80\x93 x"
    assert counts.tolist() == [2, 3]


def test_specials_pair_by_role(two_families):
    student, teacher, roots = vocabularies.byte_level(), vocabularies.sentencepiece_bpe(), two_families.roots
    assert roots.student[student.eos_token_id] == roots.teacher[teacher.eos_token_id] < roots.count


def sampled_live_sets(student, teacher, tokens=40, candidates=60, seed=0):
    """Compare live rows with what the tokenizers do: `(wrong, tested)`."""
    built = build_tables(student, teacher)
    rng, wrong, tested = random.Random(seed), 0, 0
    for part, own, other in ((built.student, student, teacher), (built.teacher, teacher, student)):
        writer, pieces = Retokenizer(other, token_table(other)), token_table(own).pieces
        texts = writer.table.pieces
        for w in rng.sample(range(len(texts)), min(tokens, len(texts))):
            row = live_rows(part.live, [w])[0]
            dead = np.flatnonzero(~row).tolist()
            some = rng.sample(range(len(pieces)), candidates) + rng.sample(dead, min(candidates, len(dead)))
            some = [x for x in some if part.spelled.count[x] and is_text(texts[w] + pieces[x])]
            if not is_text(texts[w]) or writer([texts[w]])[0].tolist() != [w] or not some:
                continue
            ids, counts = writer([texts[w] + pieces[x] for x in some])
            cut = ids[np.cumsum(counts) - counts] == w
            wrong, tested = wrong + int((cut != row[some]).sum()), tested + len(some)
    return wrong, tested


def is_text(data):
    return data.decode("utf-8", "ignore").encode() == data


def test_live_sets_of_real_vocabularies():
    wrong, tested = sampled_live_sets(vocabularies.tekken(8000), vocabularies.sentencepiece_bpe())
    assert tested > 2000
    assert wrong == 0


def test_too_many_pairs_leave_the_cut_unconditioned(monkeypatch, caplog):
    monkeypatch.setattr("xtoken_core.chain.live_sets.MOST_PAIRS", 10)
    with caplog.at_level(logging.WARNING, "xtoken.chain"):
        built = build_tables(vocabularies.byte_level(), vocabularies.unigram())
    assert built.student.live.method == "none"
    assert built.teacher.live.method == "merges"
    assert "not conditioned on" in caplog.text


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.flat().values(), b.flat().values(), strict=True))


@pytest.fixture
def pair():
    return vocabularies.byte_level(300), vocabularies.byte_level(400)


def test_tables_are_built_once_and_read_again(pair, tmp_path, monkeypatch):
    built = cached_tables(*pair, tmp_path)
    monkeypatch.setattr("xtoken_core.chain.build.build_tables", None)
    again = cached_tables(*pair, tmp_path)
    assert same(built, again)
    assert same(again, as_tensors(build_tables(*pair)))
    assert len(list((tmp_path / "chain").iterdir())) == 1


@pytest.mark.parametrize("damage", ["version", "other pair", "bytes"])
def test_files_that_do_not_fit_are_built_again(pair, tmp_path, caplog, damage):
    built = cached_tables(*pair, tmp_path)
    (path,) = (tmp_path / "chain").iterdir()
    if damage == "version":
        save_file({"x": torch.zeros(1)}, path, {"format": "xtoken-chain-0"})
    elif damage == "other pair":
        write_tables(built, path, ("a", "b"))
    else:
        damaged = path.read_bytes()[:-1000]
        path.unlink()  # processes have the old file mapped
        path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING, "xtoken.pairs"):
        assert same(cached_tables(*pair, tmp_path), built)
        assert same(cached_tables(*pair, tmp_path), built)
    assert len(caplog.records) == 1
    assert {"version": "xtoken-chain-0", "other pair": "other tokenizers", "bytes": "damaged"}[damage] in caplog.text
