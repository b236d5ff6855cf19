"""Splits of pairs of tokens, found by one pair of each two groups, beside the splits of every pair."""

import random

import pytest
from tokenizers import Regex, pre_tokenizers

from tests.unit.chain.tiny_tokenizers import LLAMA_3, PATTERNS
from xtoken_core.chain.tables import BROKEN, JOINED, KEPT
from xtoken_core.chain.word_splits import word_splits

CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLITS = PATTERNS | {
    "one digit": LLAMA_3.replace("{1,3}", ""),
    "marks": r" ?\p{L}+|\p{N}|[\p{P}\p{S}]+|\s+|[^\s\p{L}\p{N}\p{P}\p{S}]+",
    "case": rf"{CASED}*{LOWER}+{CONTRACTION}|{CASED}+{LOWER}*{CONTRACTION}" + LLAMA_3[LLAMA_3.index(r"|\p{N}") :],
}
CHARACTERS = "11122''''ssrretvllRdmb.._ \n\n\t\x1cé\u200b"
WORDS = ["'", "'re", "'LL", "'x", "'ab", "'r", "re", "reb", "sb", "e", "l", "'sb", "123", "12", "1\n", "\n \n", "..b"]
WORDS += ["m'r", "m'd", *("\n" * count + " \n" for count in (3, 4))]


def every_pair(first, second, split):
    """By pair, the state and the beginning of the second text that belongs to the first one's last word."""
    found = {}
    for w in first:
        alone = split(w)
        for x in second:
            ends = split(w + x)
            if ends[: len(alone)] == alone:
                found[w, x] = KEPT, ""
            elif ends[: len(alone) - 1] == alone[:-1] and ends[len(alone) - 1] > len(w):
                found[w, x] = JOINED, x[: min(ends[len(alone) - 1] - len(w), split(x)[0])]
            else:
                found[w, x] = BROKEN, ""
    return found


def by_groups(first, second, split):
    splits = word_splits([w.encode() for w in first], [x.encode() for x in second], split)
    found = {}
    for i, w in enumerate(first):
        for j, x in enumerate(second):
            state = int(splits.state[splits.tail[i], splits.head[j]])
            beginning = splits.shorter[state - JOINED - 1][j].decode() if state > JOINED else x[: split(x)[0]]
            found[w, x] = min(state, JOINED), beginning if state >= JOINED else ""
    return found


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_groups_give_what_every_pair_does(name):
    splitter = pre_tokenizers.Split(Regex(SPLITS[name]), "isolated")

    def split(text):
        return [end for _, (_, end) in splitter.pre_tokenize_str(text)]

    rng = random.Random(0)
    drawn = ["".join(rng.choice(CHARACTERS) for _ in range(rng.randint(1, 5))) for _ in range(200)]
    texts = list(dict.fromkeys([*WORDS, *drawn]))
    expected, found = every_pair(texts, texts, split), by_groups(texts, texts, split)
    assert found == expected


def test_texts_that_no_pattern_distinguishes_are_one_group():
    texts = [b"word", b"name", b" word", b" more", b"'sable", b"'sort", b"it.is", b"on.to.an", b"'other", b"'words"]
    splits = word_splits(texts, texts, None)
    assert splits.tail.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 2, 2]
    assert splits.head.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
