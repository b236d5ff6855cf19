"""The experiment on real vocabularies: its counts are those of the library's tables, its page has its results."""

import pytest
import torch

from experiments.real import combinations
from experiments.vocabularies import page
from experiments.vocabularies.chunks import Counts, class_of, may_follow
from experiments.white_space import page as white_space
from tests.support import vocabularies
from xtoken_core.chain import ChainTables, build_tables
from xtoken_core.ops.chain.live import live_mask

TEXTS = ["two  spaces and\n    newer 123 words", "", "lowest, widest 4567\n"]


@pytest.fixture(scope="module")
def pair():
    tokenizers = vocabularies.byte_level(300), vocabularies.byte_level(400)
    return tokenizers, ChainTables.of(build_tables(*tokenizers))


def test_one_pair_of_tokens_is_as_in_the_mask(pair):
    _, tables = pair
    for side in (tables.student, tables.teacher):
        before = torch.arange(len(side.live.tail) - 40, len(side.live.tail), 2)
        mask = live_mask(side.live, before)
        assert not mask.all()
        for token in range(0, mask.shape[1], 5):
            found = [may_follow(side.live, w, token) for w in before.tolist()]
            assert found == mask[:, token].tolist()


def test_counts_of_texts(pair):
    tokenizers, tables = pair
    counts = Counts(tokenizers, tables)
    counts.add(TEXTS)
    found = counts.summary()
    assert found["tokens"] == [sum(len(each.encode(text)) for text in TEXTS) for each in tokenizers]
    assert found["rootless"] == [0, 0] and found["incorrect chunks"] == 0
    assert set(found["classes"]) == {"spaces", "line ends", "numerals", "other"}
    for each in found["classes"].values():
        assert sum(each.get(shape, 0) for shape in ("1:1", "1:n", "n:1", "m:n")) == each["chunks"]


def test_classes_of_text():
    assert [class_of(text.encode()) for text in (" ", "\n ", " 12", "a1")] == [
        "spaces",
        "line ends",
        "numerals",
        "other",
    ]


def test_the_page_is_in_step_with_the_results():
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.written() == text, "run: python -m experiments.vocabularies.page"
    assert white_space.written() == text, "run: python -m experiments.white_space.page"
    assert combinations.written() == text, "run: python -m experiments.real.combinations"
