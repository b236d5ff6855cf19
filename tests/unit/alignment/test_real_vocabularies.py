"""The vocabularies that mistral-common carries: one byte-level, one of SentencePiece, in both their wrappings."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support import vocabularies as v
from tests.support.alignments import aligner_of, check_batch, chunks_of, padded, spelled
from tests.support.examples import examples

MAKERS = {
    "tekken": v.tekken,
    "tekken of mistral-common": v.mistral_tekken,
    "sentencepiece": v.sentencepiece_bpe,
    "sentencepiece, legacy prefix": lambda: v.sentencepiece_bpe("legacy"),
    "sentencepiece, slow": v.slow_sentencepiece,
    "sentencepiece of mistral-common": v.mistral_sentencepiece,
}
PAIRS = [
    ("tekken", "sentencepiece"),
    ("sentencepiece", "tekken of mistral-common"),
    ("sentencepiece, legacy prefix", "tekken"),
    ("tekken", "sentencepiece, slow"),
    ("sentencepiece of mistral-common", "tekken"),
]


@pytest.fixture(scope="module", params=PAIRS, ids=" | ".join)
def pair(request):
    student, teacher = (MAKERS[name]() for name in request.param)
    return student, teacher, aligner_of(student, teacher)


def encoded(tokenizer, texts, cap=None, left=False):
    return padded([[int(i) for i in tokenizer.encode(text)][:cap] for text in texts], pad=9, left=left)


def check_equal_bytes(aligner, batch, s, t):
    for row in range(len(s)):
        for n, (ours, theirs) in enumerate(chunks_of(batch, row)):
            left, right = spelled(aligner.student, s[row][ours]), spelled(aligner.teacher, t[row][theirs])
            if left != right:  # one side has the space that its tokenizer put before the text
                assert n <= 1
                assert left == b" " + right or right == b" " + left
            assert bool(batch.pair_is_correct[row, n])


@pytest.mark.parametrize("cap", [None, 17], ids=["whole", "both sides cut at 17"])
def test_every_chunk_spells_the_same_bytes(pair, cap):
    student, teacher, aligner = pair
    texts = list(v.TEXTS.values())
    (s, s_mask), (t, t_mask) = encoded(student, texts, cap), encoded(teacher, texts, cap)
    batch = aligner.align(s, t, student_attention_mask=s_mask, teacher_attention_mask=t_mask)
    check_batch(batch, s_mask, t_mask)
    check_equal_bytes(aligner, batch, s, t)
    if cap is None:  # all of the text is in some chunk: only the tokenizer's own space and eos may be left over
        left_over = (batch.student_chunk_id < 0) & (s_mask > 0)
        assert int(left_over.sum(dim=1).max()) <= 2
        covered = [
            b"".join(spelled(aligner.student, s[r][ours]) for ours, _ in chunks_of(batch, r)) for r in range(len(s))
        ]
        assert [c.removeprefix(b" ").lstrip() for c in covered] == [x.encode().lstrip() for x in texts]


def test_the_number_of_chunks_is_the_number_of_common_ends(pair):
    """Ends of tokens as prefixes of the text, by each tokenizer's own decoding of its ids."""
    student, teacher, aligner = pair
    texts = list(v.TEXTS.values())
    (s, s_mask), (t, t_mask) = encoded(student, texts), encoded(teacher, texts)
    batch = aligner.align(s, t, student_attention_mask=s_mask, teacher_attention_mask=t_mask)
    for row, text in enumerate(texts):
        ends = []
        for table, ids, mask in ((aligner.student, s, s_mask), (aligner.teacher, t, t_mask)):
            pieces = [table.pieces[int(i)] for i in ids[row][mask[row] > 0]]
            own = len(b"".join(pieces)) - len(text.encode())
            assert own in (0, 1)
            reached = [len(b"".join(pieces[: n + 1])) - own for n in range(len(pieces))]
            ends.append({end for end in reached if end > 0})
        bos = 1 if int(batch.student_chunk_id[row, 0]) == 0 and not aligner.student.pieces[int(s[row, 0])] else 0
        assert int(batch.num_chunks[row]) - bos - len(ends[0] & ends[1]) in (0, 1)  # 1: a pair of eos


@examples(20, 60)
@given(st.lists(st.text(max_size=24), min_size=1, max_size=3), st.integers(3, 40), st.booleans(), st.booleans())
def test_random_unicode(texts, cap, left, ids_alone):
    student, teacher = v.tekken(), v.sentencepiece_bpe()
    aligner = aligner_of(student, teacher)
    (s, s_mask), (t, t_mask) = (encoded(tokenizer, texts, cap, left) for tokenizer in (student, teacher))
    batch = aligner.align(
        s, t, student_attention_mask=s_mask, teacher_attention_mask=t_mask, texts=None if ids_alone else texts
    )
    check_batch(batch, s_mask, t_mask)
    check_equal_bytes(aligner, batch, s, t)
    assert torch.equal(batch.pair_is_correct, batch.pair_valid)


def test_an_id_outside_the_vocabulary_is_named(pair):
    from xtoken_core.errors import InputError

    _, _, aligner = pair
    size = len(aligner.student)
    ids, mask = padded([[size]])
    with pytest.raises(InputError, match=rf"student's ids hold {size}, its tokenizer has the ids 0 to {size - 1}"):
        aligner.align(ids, ids * 0, student_attention_mask=mask, teacher_attention_mask=mask)
