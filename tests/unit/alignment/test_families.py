"""Every tokenizer family against a byte-level one: what its tokens spell, and the alignment of every script."""

import pytest
import torch

from tests.support import vocabularies as v
from tests.support.alignments import aligner_of, check_batch, padded
from xtoken_core.alignment import TokenAligner

FAMILIES = {
    "byte-level BPE": v.byte_level,
    "byte-level BPE with bos": lambda: v.byte_level(bos=True),
    "byte-level BPE with a prefix space": lambda: v.byte_level(prefix_space=True),
    "byte-level BPE that composes": lambda: v.byte_level(form="NFC"),
    "sentencepiece BPE, prefix first": v.sentencepiece_bpe,
    "sentencepiece BPE, prefix always": lambda: v.sentencepiece_bpe("always"),
    "sentencepiece BPE, no prefix": lambda: v.sentencepiece_bpe("never"),
    "sentencepiece BPE, legacy": lambda: v.sentencepiece_bpe("legacy"),
    "sentencepiece, slow": v.slow_sentencepiece,
    "unigram with byte fallback": v.unigram,
    "unigram without byte fallback": lambda: v.unigram(byte_fallback=False),
    "unigram with NFKC": lambda: v.unigram(nfkc=True),
    "wordpiece": v.wordpiece,
    "wordpiece in lower case": lambda: v.wordpiece(lowercase=True),
    "characters": v.characters,
    "bytes": v.byte_tokenizer,
}
LOSSY = {"unigram with NFKC", "wordpiece", "wordpiece in lower case", "byte-level BPE that composes"}
WITH_UNKNOWN = {"unigram without byte fallback", "wordpiece", "wordpiece in lower case", "characters"}


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def family(request):
    return request.param, FAMILIES[request.param]()


def aligned(student, teacher, texts, *, with_texts, left=False):
    aligner = aligner_of(student, teacher)
    s, s_mask = padded([student.encode(text) for text in texts], pad=9, left=left)
    t, t_mask = padded([teacher.encode(text) for text in texts], pad=9, left=left)
    batch = aligner.align(
        s, t, student_attention_mask=s_mask, teacher_attention_mask=t_mask, texts=texts if with_texts else None
    )
    check_batch(batch, s_mask, t_mask)
    return batch, s_mask


@pytest.mark.parametrize("text", v.TEXTS.values(), ids=v.TEXTS)
def test_tokens_spell_the_text(family, text):
    name, tokenizer = family
    ids = tokenizer.encode(text, add_special_tokens=False)
    table = aligner_of(tokenizer, v.byte_level(500)).student
    if name in LOSSY or any(table.kinds[i] == 2 for i in ids):
        pytest.skip("the tokens do not tell the bytes")
    found = table.spell(ids)
    assert found == (b" " if table.prefix != "none" and found != text.encode() else b"") + text.encode()


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_with_the_texts_every_chunk_agrees(family, role):
    name, tokenizer = family
    other = v.byte_level(500)
    texts = list(v.TEXTS.values())
    pair = (tokenizer, other) if role == "student" else (other, tokenizer)
    batch, _ = aligned(*pair, texts, with_texts=True)
    assert torch.equal(batch.pair_is_correct, batch.pair_valid)
    coarse = name in LOSSY | {"unigram without byte fallback"}
    assert int(batch.num_chunks.min()) >= (1 if not coarse else 0)
    assert int(batch.num_chunks.sum()) >= 60


def test_from_ids_alone_every_chunk_agrees_where_they_tell_the_bytes(family):
    name, tokenizer = family
    texts = [text for key, text in v.TEXTS.items() if key not in ("rare",)]
    batch, s_mask = aligned(tokenizer, v.byte_level(500), texts, with_texts=False)
    if name not in WITH_UNKNOWN:
        assert torch.equal(batch.pair_is_correct, batch.pair_valid)
    assert int((batch.student_chunk_id >= 0).sum()) > 0.6 * int(s_mask.sum())


@pytest.mark.slow
def test_a_vocabulary_of_all_code_points():
    texts = list(v.TEXTS.values())
    batch, s_mask = aligned(v.code_points(), v.byte_level(500), texts, with_texts=False)
    assert torch.equal(batch.pair_is_correct, batch.pair_valid)
    assert int((batch.student_chunk_id >= 0).sum()) >= int(s_mask.sum()) - 2 * len(texts)


def test_normalising_tokenizers_are_named_once(caplog):
    aligner = TokenAligner(v.wordpiece(lowercase=True), v.byte_level(form="NFC"))
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "student's tokenizer cleans text as BERT does and spells no spaces" in aligner.notes[0]
    assert "teacher's tokenizer NFC" in aligner.notes[1]
    assert TokenAligner(v.byte_level(), v.byte_level(400)).notes == ()


def test_lower_case_pairs_with_the_word_it_was_made_from():
    student, teacher = v.wordpiece(lowercase=True), v.byte_level()
    batch, _ = aligned(student, teacher, ["The Quick BROWN fox"], with_texts=False)
    assert torch.equal(batch.pair_is_correct, batch.pair_valid)
    assert int(batch.num_chunks) >= 4


def test_a_composed_letter_is_one_chunk_with_its_parts():
    composing, plain = v.byte_level(form="NFC"), v.byte_level(300)
    batch, _ = aligned(composing, plain, ["abe\u0301cd"], with_texts=False)
    assert torch.equal(batch.pair_is_correct, batch.pair_valid)
    assert int((batch.student_chunk_id < 0).sum()) == 0


def test_an_unknown_token_is_one_incorrect_chunk_and_nothing_shifts():
    characters, byte_level = v.characters(), v.byte_level()
    text = "the lazy \u2622\u2623 dog jumps"
    batch, _ = aligned(characters, byte_level, [text], with_texts=False)
    wrong = (batch.pair_valid & ~batch.pair_is_correct).sum()
    assert int(wrong) == 1
    tokens = characters.tokenize(text)
    after = [int(c) for c, token in zip(batch.student_chunk_id[0], tokens, strict=True) if token in "jumps"]
    assert all(bool(batch.pair_is_correct[0, c]) for c in after) and len(after) >= 5
    batch, _ = aligned(characters, byte_level, [text], with_texts=True)
    assert torch.equal(batch.pair_is_correct, batch.pair_valid)


def test_a_text_of_nothing_but_an_unknown_token_is_one_incorrect_chunk():
    batch, _ = aligned(v.characters(), v.byte_level(), ["\u2622"], with_texts=False)
    assert batch.num_chunks.tolist() == [1]
    assert not bool(batch.pair_is_correct.any())


@pytest.mark.parametrize("text", ["world", " world", " "], ids=repr)
def test_a_space_that_both_sides_spell_is_in_a_chunk(text):
    student, teacher = v.unigram(), v.sentencepiece_bpe("first")  # both add a space only where it is missing
    batch, mask = aligned(student, teacher, [text], with_texts=False)
    assert torch.equal(batch.pair_is_correct, batch.pair_valid)
    assert bool((batch.student_chunk_id[mask > 0] >= 0).all())


@pytest.mark.parametrize("text", [" leading", "  two", "none", "\nline", " "], ids=repr)
@pytest.mark.parametrize("other", [v.byte_level, v.unigram, v.slow_sentencepiece], ids=["none", "missing", "always"])
@pytest.mark.parametrize("prefix", ["first", "always", "legacy", "never"])
def test_the_tokenizers_own_space_is_told_from_the_texts(prefix, other, text):
    for pair in ((v.sentencepiece_bpe(prefix), other()), (other(), v.sentencepiece_bpe(prefix))):
        chunks = set()
        for left in (False, True):
            batch, _ = aligned(*pair, [text, "a longer text than the others"], with_texts=False, left=left)
            assert torch.equal(batch.pair_is_correct, batch.pair_valid)
            chunks.add(tuple(batch.num_chunks.tolist()))
        assert len(chunks) == 1 or not text.strip()  # a slow SentencePiece does not tell one space from its own
        assert min(max(chunks)) >= 1
