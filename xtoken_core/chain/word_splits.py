"""Word splits: where a tokenizer splits a text between two tokens before its model sees it, by classes of characters.

Most tokenizers split a text into words with a regular expression first. Whether it splits after the text of a token
depends on the kinds of the characters on both sides. Tokens are grouped by the kinds of their last and of their first
three runs of characters, and one pair of each two groups is given to the tokenizer.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

BROKEN, KEPT, JOINED = 0, 1, 2
"""What follows from the split of two tokens' text: the first is cut into other pieces, it is a word's end, or both are
parts of one word, so that the model decides."""

Split = Callable[[str], list[int]]
"""The ends of the words of a text, in characters of that text."""

RUNS = 3
_RUN = re.compile(r"(.)\1*", re.DOTALL)
_LONG_DIGITS = re.compile(r"N{4,}")
_LONG_SPACES = re.compile(r"([ \nt])\1{2,}")
_LONG_OTHERS = re.compile(r"([^N \nt])\1+")
_CONTRACTION = re.compile(r"(?:s|t|re|ve|m|ll|d)", re.IGNORECASE)


class _Kinds(dict[int, str]):
    """Code point to the letter of its kind, as the split patterns of published tokenizers distinguish characters."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        category = unicodedata.category(char)
        if char in " '/_":
            kind = char
        elif char in "\r\n":
            kind = "\n"
        elif category == "Cs":
            kind = "b"  # a byte that is not a whole character
        elif category[0] == "L":
            kind = {"Lu": "A", "Lt": "A", "Ll": "a"}.get(category, "o")
        elif category[0] in "MN":
            kind = category[0]
        elif char.isspace():
            kind = "t"
        else:
            kind = "." if category[0] in "PS" else "c"
        self[code] = kind
        return kind


_KINDS = _Kinds()


@dataclass(frozen=True)
class WordSplits:
    """The groups of tokens and what happens between two of them.

    Attributes:
        tail: `[V_w]` int32, the group of a token by its end.
        head: `[V_x]` int32, the group of a token by its beginning.
        state: `[tails, heads]` uint8: `BROKEN`, `KEPT` or `JOINED`.
    """

    tail: np.ndarray
    head: np.ndarray
    state: np.ndarray


def word_splits(first: Sequence[bytes], second: Sequence[bytes], split: Split | None) -> WordSplits:
    """Group tokens and test one pair of each two groups.

    Args:
        first: By id, the text of the tokens that end before the boundary; empty for specials, always `KEPT`.
        second: By id, the text of the tokens that begin after it.
        split: The tokenizer's split into words; None if it has none.
    """
    tail, tails = _grouped(first, _tail)
    head, heads = _grouped(second, _head)
    state = np.full((len(tails), len(heads)), JOINED, dtype=np.uint8)
    afters = [_Beginning.of(text) for text in heads]
    for i, text in enumerate(tails):
        state[i] = _states(split, text, afters)
    return WordSplits(tail, head, state)


@dataclass(frozen=True)
class _Beginning:
    """Text up to its first byte that is not a whole character; `broken` if it begins with such a byte."""

    text: str
    broken: bool

    @classmethod
    def of(cls, text: str) -> _Beginning:
        kinds = text.translate(_KINDS)
        return cls(text[: kinds.index("b")] if "b" in kinds else text, kinds[:1] == "b")


def _states(split: Split | None, before: str, afters: Sequence[_Beginning]) -> list[int]:
    """Compare the words of a text alone with those of the same text and what follows it."""
    reverse = _Beginning.of(before[::-1])
    if not before:
        return [KEPT] * len(afters)
    if split is None or reverse.broken:  # inside a character no split is possible
        return [JOINED if after.text or after.broken else KEPT for after in afters]
    whole = reverse.text[::-1]
    alone = split(whole)
    found = []
    for after in afters:
        if after.broken or not after.text:
            found.append(JOINED if after.broken else KEPT)
            continue
        inside = [end for end in split(whole + after.text) if end <= alone[-1]] if alone else []
        found.append(KEPT if inside == alone else JOINED if inside == alone[:-1] else BROKEN)
    return found


def _grouped(pieces: Sequence[bytes], signature: Callable[[str], str]) -> tuple[np.ndarray, list[str]]:
    """Number the signatures; the first token of each group stands for it."""
    numbers: dict[str, int] = {}
    texts: list[str] = []
    of_token = np.zeros(len(pieces), dtype=np.int32)
    for index, piece in enumerate(pieces):
        text = piece.decode("utf-8", "surrogateescape")
        key = signature(text)
        if key not in numbers:
            numbers[key] = len(texts)
            texts.append(text)
        of_token[index] = numbers[key]
    return of_token, texts


def _tail(text: str) -> str:
    at = text.rfind("'")
    after = text[at + 1 :].lower() if at >= 0 and len(text) - at <= 3 else ""
    return "".join(_runs(text[-32:].translate(_KINDS))[-RUNS:]) + "\0" + after


def _head(text: str) -> str:
    word = text[1:] if text[:1] == "'" else text
    contraction = _CONTRACTION.match(word)
    beginning = "".join(_runs(text[:32].translate(_KINDS))[:RUNS])
    return beginning + "\0" + (contraction[0].lower() if contraction else "")


@lru_cache(maxsize=1 << 16)  # a vocabulary has far fewer kinds of tokens than tokens
def _runs(kinds: str) -> tuple[str, ...]:
    """Return the runs of equal kinds, shortened to what patterns count: 3 digits, 2 spaces, 1 other."""
    kinds = _LONG_SPACES.sub(r"\1\1\1", _LONG_DIGITS.sub("NNNN", kinds))
    return tuple(run.group() for run in _RUN.finditer(_LONG_OTHERS.sub(r"\1\1", kinds)))
