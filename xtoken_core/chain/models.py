"""Properties of a tokenizer's model that the chain tables need: its merge rules and its split into words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from xtoken_core.alignment.tables import TokenTable, tekkenizer
from xtoken_core.chain.merges import MergeForest, MergeRules, merge_forest
from xtoken_core.chain.word_splits import Split
from xtoken_core.projection.retokenize import Retokenizer


@dataclass(frozen=True)
class BpeModel:
    """A BPE tokenizer as the tables see it.

    Attributes:
        forest: The tree of every token.
        split: How it splits a text into words; None: it does not.
        whole_words: A word that is a token is written as that token, whether its merges make it or not.
    """

    forest: MergeForest
    split: Split | None
    whole_words: bool


def bpe_model(tokenizer: Any, writer: Retokenizer) -> BpeModel | None:
    """Read the merge rules of a BPE tokenizer; None for a tokenizer of another kind, or one that hides its rules.

    Args:
        tokenizer: Hugging Face fast, or mistral-common's tekken.
        writer: Its form for text inside a text.
    """
    table, backend = writer.table, writer.backend
    if backend is None:
        return _tekken(tokenizer, table)
    state = json.loads(backend.to_str())
    model = state["model"]
    if model.get("type") != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    vocab: Mapping[str, int] = model["vocab"]
    pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    size = len(table)
    # A rank counts the rules that can be applied; one whose result is no token never is.
    known = [(vocab[a], vocab[b], vocab[a + b]) for a, b in pairs if a in vocab and b in vocab and a + b in vocab]
    rules = np.array(known, dtype=np.int64).reshape(-1, 3)
    atoms: list[list[int]] = [[] for _ in range(size)]
    for text, index in vocab.items():
        characters = [vocab.get(char, -1) for char in text]
        # A token with a character that is no token itself is added text: no rule makes it, it is an atom.
        atoms[index] = [index] if -1 in characters else characters
    for index in np.flatnonzero(table.kinds).tolist():
        atoms[index] = []
    forest = merge_forest(MergeRules(rules[:, 0], rules[:, 1], rules[:, 2]), atoms)
    return BpeModel(forest, backend_split(backend), bool(model.get("ignore_merges")))


def is_unigram(tokenizer: Any) -> bool:
    """Return True for a Unigram tokenizer, which chooses the most likely of all cuts of a word.

    Args:
        tokenizer: Hugging Face fast or slow, or mistral-common's.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return type(backend.model).__name__ == "Unigram"
    inner = getattr(tokenizer, "sp_model", None)
    # SentencePiece writes a Unigram's log-probabilities and a BPE's negative ranks into the same field.
    return inner is not None and any(not inner.GetScore(i).is_integer() for i in range(inner.GetPieceSize()))


def backend_split(backend: Any) -> Split | None:
    """Return the split into words of a `tokenizers` tokenizer; None if it has none."""
    words, normalizer = backend.pre_tokenizer, backend.normalizer
    if words is None:
        return None

    def split(text: str) -> list[int]:
        if normalizer is not None:
            text = normalizer.normalize_str(text)
        return [end for _, (_, end) in words.pre_tokenize_str(text)]

    return split


def _tekken(tokenizer: Any, table: TokenTable) -> BpeModel | None:
    """Read mistral-common's byte-level BPE: any two tokens whose bytes together are a token have a rule of its rank."""
    inner = tekkenizer(tokenizer)
    if inner is None:
        return None
    ids = {piece: index for index, piece in enumerate(table.pieces) if piece}
    # Tekken stores ranks of results, not pairs: every cut of a token into two tokens is a rule of its rank.
    rows = [
        (ids[piece[:at]], ids[piece[at:]], index)
        for piece, index in sorted(ids.items(), key=lambda item: item[1])
        for at in range(1, len(piece))
        if piece[:at] in ids and piece[at:] in ids
    ]
    rules = np.array(rows, dtype=np.int64).reshape(-1, 3)
    atoms = [[ids[piece[i : i + 1]] for i in range(len(piece))] for piece in table.pieces]
    forest = merge_forest(MergeRules(rules[:, 0], rules[:, 1], rules[:, 2]), atoms)
    return BpeModel(forest, _pattern_split(inner._model._pat_str), True)


def _pattern_split(pattern: str) -> Split:
    from tokenizers import Regex, pre_tokenizers

    splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
    return lambda text: [end for _, (_, end) in splitter.pre_tokenize_str(text)]
