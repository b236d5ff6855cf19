"""A source of text whose next-token distributions are known exactly, and two tokenizers trained on samples of it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split()
COMMON_WORDS = 305
"""Words at the beginning of the file, from which small sources draw; larger ones use the compounds and names too."""
KINDS = ("word", "numeral", "mark", "line")
FOLLOWS = np.array(
    [  # rows: the kind before; columns: word, numeral, mark, line
        [0.72, 0.08, 0.16, 0.04],
        [0.55, 0.05, 0.35, 0.05],
        [0.80, 0.10, 0.00, 0.10],
        [1.00, 0.00, 0.00, 0.00],
    ]
)
WHOLE_NUMERALS = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLIT_NUMERALS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
JOINED_LINES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\n]*|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Source:
    """Units of text in kinds; a unit depends on the kind of the one before it.

    Attributes:
        units: Their text.
        kind: `[U]` int, the place of each unit's kind in `KINDS`.
        weight: `[K, U]` float64, probability of each unit after a unit of each kind.
        stationary: `[K]` float64, how often a unit of each kind is met.
    """

    units: tuple[str, ...]
    kind: np.ndarray
    weight: np.ndarray
    stationary: np.ndarray


def make_source(words: int, numerals: int, seed: int, *, joined_lines: bool = False) -> Source:
    """Draw probabilities for the units: Zipf's law in random order.

    Args:
        words: How many of the words.
        numerals: How many numerals of one to three digits.
        seed: Of the draws.
        joined_lines: A mark and the line's end after it are one unit, for a tokenizer that joins them.
    """
    rng = np.random.default_rng(seed)
    pool = WORDS[: max(words, COMMON_WORDS)]
    chosen = [f" {pool[i]}" for i in rng.permutation(len(pool))[:words]]
    digits = [*range(10), *rng.permutation(np.arange(10, 1000))[: max(0, numerals - 10)].tolist()]
    groups = [
        list(dict.fromkeys(chosen)),
        [f" {n}" for n in digits],
        [".", ",", ":", ";"],
        ["\n", "\n\n", "\n  ", "\n    "],
    ]
    follows = FOLLOWS.copy()
    if joined_lines:
        mark, line = KINDS.index("mark"), KINDS.index("line")
        groups[line] += [mark_ + end for mark_ in groups[mark] for end in groups[line]]
        follows[mark, line] = 0.0
        follows /= follows.sum(1, keepdims=True)
    kind = np.concatenate([np.full(len(group), k) for k, group in enumerate(groups)])
    within = np.zeros(len(kind))
    for k, group in enumerate(groups):
        zipf = 1.0 / (1.0 + rng.permutation(len(group)))
        within[kind == k] = zipf / zipf.sum()
    values, vectors = np.linalg.eig(follows.T)
    stationary = np.real(vectors[:, np.argmax(np.real(values))])
    units = tuple(unit for group in groups for unit in group)
    return Source(units, kind, follows[:, kind] * within, stationary / stationary.sum())


def sample_texts(source: Source, count: int, length: int, seed: int) -> list[list[int]]:
    """Draw texts as lists of units; each begins after a line's end."""
    rng, texts = random.Random(seed), []
    cumulative = [list(accumulate(row)) for row in source.weight.tolist()]
    for _ in range(count):
        units, kind = [], KINDS.index("line")
        for _ in range(length):
            (unit,) = rng.choices(range(len(source.units)), cum_weights=cumulative[kind])
            units.append(unit)
            kind = int(source.kind[unit])
        texts.append(units)
    return texts


def train_tokenizer(source: Source, size: int, pattern: str, seed: int, model: str = "bpe") -> PreTrainedTokenizerFast:
    """Train a tokenizer on samples of the source.

    Args:
        source: The source.
        size: Tokens.
        pattern: How it splits a text into words.
        seed: Of the samples.
        model: `bpe` or `unigram`.
    """
    texts = ["".join(source.units[u] for u in units) for units in sample_texts(source, 400, 200, seed)]
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    everything = "".join(source.units)
    alphabet = sorted({char for word, _ in to_bytes.pre_tokenize_str(everything) for char in word})
    if model == "bpe":
        tokenizer = Tokenizer(models.BPE())
        trainer: trainers.Trainer = trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=alphabet, special_tokens=["<e>"], show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=size, initial_alphabet=alphabet, special_tokens=["<e>"], unk_token="<e>", show_progress=False
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", clean_up_tokenization_spaces=False)
