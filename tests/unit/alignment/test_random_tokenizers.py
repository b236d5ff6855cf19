"""Random tokenizers on random texts: spans and bytes of every chunk computed without the aligner."""

import random

import pytest

from tests.support.alignment_oracle import is_right, place, sources_of
from tests.support.alignments import check_batch, chunks_of, padded
from tests.support.random_tokenizers import random_text, random_tokenizer
from xtoken_core.alignment import TokenAligner

ROWS = 10
BOS, EOS = 1, 2


def rows_of(tokenizer, texts, draw):
    """Each text's ids: some cut off, some with specials around them."""
    rows = []
    for text in texts:
        ids = tokenizer.fast.encode(text, add_special_tokens=False)
        ids = ids[: draw.randint(0, len(ids))] if draw.random() < 0.3 else [*ids, EOS] if draw.random() < 0.5 else ids
        rows.append([BOS, *ids] if draw.random() < 0.3 else ids)
    return rows


def placed(pair, text, rows, *, with_text):
    """Both sides of a row for its text; for each text that gives the same ids if the text is not given."""
    sources = [text] if with_text else sources_of(pair, text)
    found = [
        tuple(place(tokenizer, source, row) for tokenizer, row in zip(pair, rows, strict=True)) for source in sources
    ]
    return [found[0], *(sides for sides in found[1:] if None not in sides)]


def judged(places, chunk):
    """True if the chunk is right for one of the places of its row; None if a place is unknown."""
    for sides in places:
        if None in sides:
            return None
        if is_right(sides, chunk):
            return True
    return False


def check_pair(seed, *, with_text):
    """Align ten texts by two random tokenizers; the number of chunks that are marked correct."""
    draw = random.Random(seed)
    pair = random_tokenizer(2 * seed), random_tokenizer(2 * seed + 1)
    texts = [random_text(draw) for _ in range(ROWS)]
    rows = [rows_of(tokenizer, texts, draw) for tokenizer in pair]
    (s, s_mask), (t, t_mask) = map(padded, rows)
    batch = TokenAligner(pair[0].fast, pair[1].fast).align(
        s, t, student_attention_mask=s_mask, teacher_attention_mask=t_mask, texts=texts if with_text else None
    )
    check_batch(batch, s_mask, t_mask)
    marked = 0
    for row, text in enumerate(texts):
        ids = rows[0][row], rows[1][row]
        places = placed(pair, text, ids, with_text=with_text)
        for n, chunk in enumerate(chunks_of(batch, row)):
            special = all(ids[side][chunk[side][0]] in (BOS, EOS) for side in (0, 1))
            if bool(batch.pair_is_correct[row, n]) and not special:
                right = judged(places, chunk)
                assert right is not False, (seed, [p.description for p in pair], text, ids, chunk)
                marked += right is True
    return marked


@pytest.mark.parametrize("with_text", [True, False], ids=["text", "ids"])
def test_marked_chunks_are_right(with_text):
    assert sum(check_pair(seed, with_text=with_text) for seed in range(5)) > 30


@pytest.mark.parametrize(
    ("seed", "with_text"),
    [
        pytest.param(607, False, id="added text on both sides, truncated"),
        pytest.param(353, False, id="a mark that is dropped, truncated"),
        pytest.param(852, False, id="another character becomes a space"),
        pytest.param(260, False, id="another character becomes the space of a continued text"),
        pytest.param(865, True, id="an added space that the row ends with"),
        pytest.param(142, True, id="an added space before dropped text"),
        pytest.param(104, True, id="an added space alone"),
    ],
)
def test_chunks_that_agree_by_chance_are_not_marked(seed, with_text):
    check_pair(seed, with_text=with_text)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_marked_chunks_are_right_in_many_rows(first):
    marked = [check_pair(seed, with_text=w) for seed in range(first, first + 50) for w in (True, False)]
    assert sum(marked) > 1000
