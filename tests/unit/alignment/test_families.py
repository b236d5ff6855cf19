"""Every tokenizer family against a byte-level one: what its tokens spell, and the alignment of every script."""

import unicodedata

import pytest
import torch

from tests.support import vocabularies as v
from tests.support.alignments import aligner_of, check_batch, chunks_of, padded, spelled
from xtoken_core.alignment import TokenAligner
from xtoken_core.alignment.tables import UNKNOWN

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


def plain(data):
    """Spelled bytes as every family compares them: without case, accents, compatibility forms and whitespace."""
    text = unicodedata.normalize("NFKD", data.decode("utf-8", "surrogateescape")).lower()
    return "".join(c for c in text if not c.isspace() and unicodedata.category(c) not in ("Mn", "Cf"))


def check_marks(aligner, batch, s, t, form):
    """Chunks that are marked correct spell the same, and no unknown token is in one; how many of them spell text."""
    count = 0
    for row in range(len(s)):
        for n, (ours, theirs) in enumerate(chunks_of(batch, row)):
            if bool(batch.pair_is_correct[row, n]):
                left, right = spelled(aligner.student, s[row][ours]), spelled(aligner.teacher, t[row][theirs])
                assert form(left) == form(right) or b" " + left == right or left == b" " + right
                for table, ids in ((aligner.student, s[row][ours]), (aligner.teacher, t[row][theirs])):
                    assert not (table.kinds[ids.numpy()] == UNKNOWN).any()
                count += bool(left)
    return count


@pytest.mark.parametrize("with_texts", [True, False], ids=["texts", "ids"])
@pytest.mark.parametrize("role", ["student", "teacher"])
def test_chunks_marked_correct_spell_the_same(family, role, with_texts):
    name, tokenizer = family
    texts = list(v.TEXTS.values())
    pair = (tokenizer, v.byte_level(500)) if role == "student" else (v.byte_level(500), tokenizer)
    batch, _ = aligned(*pair, texts, with_texts=with_texts)
    s, t = (padded([side.encode(text) for text in texts], pad=9)[0] for side in pair)
    form = plain if name in LOSSY else bytes
    assert check_marks(aligner_of(*pair), batch, s, t, form) >= (60 if with_texts or name not in WITH_UNKNOWN else 30)
    if name not in WITH_UNKNOWN:
        assert torch.equal(batch.pair_is_correct, batch.pair_valid)


@pytest.mark.slow
def test_a_vocabulary_of_all_code_points():
    texts = list(v.TEXTS.values())
    batch, s_mask = aligned(v.code_points(), v.byte_level(500), texts, with_texts=False)
    assert torch.equal(batch.pair_is_correct, batch.pair_valid)
    assert int((batch.student_chunk_id >= 0).sum()) >= int(s_mask.sum()) - 2 * len(texts)


@pytest.mark.parametrize("with_texts", [True, False], ids=["texts", "ids"])
@pytest.mark.parametrize("role", ["student", "teacher"])
@pytest.mark.parametrize("text", ["cafe\u0301 now", "x \u1112\u1161\u11ab y", "e\u0323\u0301 q", "e\u0301\u0323 q"])
def test_decomposed_text_under_a_composing_normaliser(text, role, with_texts):
    pair = (v.byte_level(500), v.byte_level(form="NFC"))[:: 1 if role == "student" else -1]
    batch, _ = aligned(*pair, [text], with_texts=with_texts)
    aligner, ids = aligner_of(*pair), [torch.tensor(side.encode(text)) for side in pair]
    at = ["", ""]
    for n, groups in enumerate(chunks_of(batch, 0)):
        parts = [
            spelled(t, i[g]).decode() for t, i, g in zip((aligner.student, aligner.teacher), ids, groups, strict=True)
        ]
        raw, composed = parts if role == "student" else parts[::-1]
        assert unicodedata.normalize("NFC", raw) == composed  # a whole stretch of the source, and what becomes of it
        assert bool(batch.pair_is_correct[0, n])
        exact = len(groups[0]) == len(groups[1]) == 1 and raw == composed
        assert bool(batch.student_exact_partition_mask[0, groups[0]].all()) == exact
        at = [at[0] + raw, at[1] + composed]
    assert at == [text, unicodedata.normalize("NFC", text)]


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
    assert int(wrong) == 2  # one for each of the two
    tokens = characters.tokenize(text)
    after = [int(c) for c, token in zip(batch.student_chunk_id[0], tokens, strict=True) if token in "jumps"]
    assert all(bool(batch.pair_is_correct[0, c]) for c in after) and len(after) >= 5
    batch, _ = aligned(characters, byte_level, [text], with_texts=True)
    assert int((batch.pair_valid & ~batch.pair_is_correct).sum()) == 2


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
