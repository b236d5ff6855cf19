"""Word splits: where a tokenizer splits a text between two tokens before its model sees it, by classes of characters.

Most tokenizers split a text into words with a regular expression first. Whether it splits after the text of a token
depends on the kinds of the characters on both sides. Tokens are grouped by the kinds of their last and of their first
three runs of characters, and one pair of each two groups is given to the tokenizer.

A word that two tokens share may end before the second token's own first word does: where digits are grouped by three,
"19" and "45" share the word "194".
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from xtoken_core.chain.tables import BROKEN, JOINED, KEPT

Split = Callable[[str], list[int]]
"""The ends of the words of a text, in characters of that text."""

RUNS = 3
_RUN = re.compile(r"(.)\1*", re.DOTALL)
# Published patterns distinguish one, two and more spaces (`\s+(?!\S)`), count digits, and of other kinds see only
# whether there is more than one.
_LONG_SPACES = re.compile(r"([ \nt])\1{2,}")
_LONG_OTHERS = re.compile(r"([^N \nt])\1+")
_CONTRACTION = re.compile(r"(?:s|t|re|ve|m|ll|d|e|l)", re.IGNORECASE)
"""What makes a contraction behind "'", and what completes one behind "'r", "'v" or "'l"."""


class _Kinds(dict[int, str]):
    """Code point to the letter of its kind, as the split patterns of published tokenizers distinguish characters."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        category = unicodedata.category(char)
        if char in " '/_":
            kind = char
        elif char in "\r\n":
            kind = "\n"
        # `surrogateescape` has written it so.
        elif category == "Cs":
            kind = "b"  # a byte that is not a whole character
        elif category[0] == "L":
            kind = {"Lu": "A", "Lt": "A", "Ll": "a"}.get(category, "o")
        elif category[0] in "MN":
            kind = category[0]
        elif char.isspace() and char not in "\x1c\x1d\x1e\x1f":  # these are no white space in a pattern
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
        state: `[tails, heads]` uint8: `BROKEN`, `KEPT` or `JOINED + k`.
        shorter: For each k > 0, `V_x` beginnings of tokens; empty for a token without one.
    """

    tail: np.ndarray
    head: np.ndarray
    state: np.ndarray
    shorter: tuple[list[bytes], ...] = ()


def word_splits(first: Sequence[bytes], second: Sequence[bytes], split: Split | None) -> WordSplits:
    """Group tokens and test one pair of each two groups.

    Args:
        first: By id, the text of the tokens that end before the boundary; empty for specials, always `KEPT`.
        second: By id, the text of the tokens that begin after it.
        split: The tokenizer's split into words; None if it has none.
    """
    tail, tails = _grouped(first, _tail)
    head, heads = _grouped(second, _head)
    afters = [_Beginning.of(text) for text in heads]
    # Characters of each text's first word.
    words = [next(iter(split(after.text)), 0) if split is not None and after.text else 0 for after in afters]
    found = np.array([_states(split, text, afters, words) for text in tails]).reshape(len(tails), len(heads))
    state = np.minimum(found, JOINED).astype(np.uint8)
    shorter: list[list[bytes]] = []
    for group in np.flatnonzero((found > JOINED).any(axis=0)).tolist():
        column, tokens = found[:, group], np.flatnonzero(head == group).tolist()
        # Several lengths may occur in one group; each gets a state of its own and its own beginnings.
        for k, number in enumerate(np.unique(column[column > JOINED]).tolist()):
            if k == len(shorter):
                shorter.append([b""] * len(second))
            state[column == number, group] = JOINED + 1 + k
            for x in tokens:
                shorter[k][x] = _beginning(second[x], heads[group], number - JOINED)
    return WordSplits(tail, head, state, tuple(shorter))


def _beginning(text: bytes, like: str, length: int) -> bytes:
    """Return the beginning of a token that `like[:length]` is of its group's: as many runs, and characters of the next.

    Args:
        text: The token.
        like: The group's token.
        length: More than 0.
    """
    string = text.decode("utf-8", "surrogateescape")
    own, ends = ([0, *(run.end() for run in _RUN.finditer(each.translate(_KINDS)))] for each in (string, like))
    # Tokens of a group agree in their runs, not in the lengths of these: count whole runs, then characters.
    runs = max(at for at, end in enumerate(ends) if end <= length)
    return string[: own[runs] + length - ends[runs]].encode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class _Beginning:
    """Text up to its first byte that is not a whole character; `broken` if it begins with such a byte."""

    text: str
    broken: bool

    @classmethod
    def of(cls, text: str) -> _Beginning:
        kinds = text.translate(_KINDS)
        return cls(text[: kinds.index("b")] if "b" in kinds else text, kinds[:1] == "b")


def _states(split: Split | None, before: str, afters: Sequence[_Beginning], words: Sequence[int]) -> list[int]:
    """Compare the words of a text alone with those of the same text and what follows it.

    Args:
        split: The tokenizer's split into words.
        before: The text.
        afters: What may follow it.
        words: The lengths of their own first words.

    Returns:
        The state of each; `JOINED + n` if the common word ends after n characters, inside the own first word.
    """
    reverse = _Beginning.of(before[::-1])
    if not before:
        return [KEPT] * len(afters)
    if split is None or reverse.broken:  # inside a character no split is possible
        return [JOINED if after.text or after.broken else KEPT for after in afters]
    whole = reverse.text[::-1]
    # Compared are the ends of words with and without what follows, never the words' text.
    alone = split(whole)
    found, count = [], len(alone)
    for after, word in zip(afters, words, strict=True):
        if after.broken or not after.text:
            found.append(JOINED if after.broken else KEPT)
            continue
        ends = split(whole + after.text)
        if ends[:count] == alone:
            found.append(KEPT)
        # All words but the last are as before and the last one is longer: the boundary lies inside of one word.
        elif ends[: count - 1] == alone[:-1] and ends[count - 1 : count] > alone[-1:]:
            common = ends[count - 1] - alone[-1]
            found.append(JOINED + common if common < word else JOINED)
        else:
            found.append(BROKEN)
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
    # A contraction is at most an apostrophe and two letters, so what decides lies in the last three characters.
    after = text[at + 1 :].lower() if at >= 0 and len(text) - at <= 3 else ""
    # The last 32 characters hold three runs of nearly any token, and bound the work for one of a thousand spaces.
    return "".join(_runs(text[-32:].translate(_KINDS))[-RUNS:]) + "\0" + after


def _head(text: str) -> str:
    word = text[1:] if text[:1] == "'" else text
    contraction = _CONTRACTION.match(word)
    beginning = "".join(_runs(text[:32].translate(_KINDS))[:RUNS])
    if contraction is None:
        return beginning
    return beginning + "\0" + contraction[0].lower() + word[contraction.end() :][:1].translate(_KINDS)


@lru_cache(maxsize=1 << 16)  # a vocabulary has far fewer kinds of tokens than tokens
def _runs(kinds: str) -> tuple[str, ...]:
    """Return the runs of equal kinds, shortened to what patterns count: all digits, 2 spaces, 1 other."""
    kinds = _LONG_SPACES.sub(r"\1\1\1", kinds)
    return tuple(run.group() for run in _RUN.finditer(_LONG_OTHERS.sub(r"\1\1", kinds)))
