"""Log-probabilities of a text's tokens as a server gives them, by the position that predicts each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from xtoken_services.common.http_engine.errors import EngineRefusalError

Entries = Sequence[tuple[int, float]]
"""Tokens with their log-probabilities."""


@dataclass(frozen=True)
class PromptScores:
    """The likeliest next tokens of every position, and the text's own.

    Attributes:
        ids: Likeliest tokens, in descending order; -1 = empty entry.
        values: Their log-probabilities; -inf in an empty entry.
        own: Log-probability of the token that follows in the text; NaN at the last position, or if it is not given.
    """

    ids: Int[np.ndarray, "T k"]
    values: Float[np.ndarray, "T k"]
    own: Float[np.ndarray, " T"]

    @property
    def listed(self) -> int:
        """Most tokens that a position lists."""
        return int((self.ids >= 0).sum(axis=1).max(initial=0))


class ScoresBuilder:
    """Collects the scores of a text, position by position.

    Args:
        length: Tokens of the text.
        k: Maximum of tokens of a position.
        vocab_size: Tokens of the vocabulary; an entry of another id is dropped.
    """

    def __init__(self, length: int, k: int, vocab_size: int) -> None:
        self._k, self._vocab_size = k, vocab_size
        self._ids = np.full((length, k), -1, dtype=np.int64)
        self._values = np.full((length, k), -np.inf)
        self._own = np.full(length, np.nan)

    def add(self, position: int, entries: Entries, own: float | None) -> None:
        """Record the scores of a position.

        Args:
            position: The position that predicts.
            entries: Tokens in any order, each once; only the likeliest `k` are kept.
            own: Log-probability of the token that follows; None: it is not given.
        """
        ids = np.fromiter((token for token, _ in entries), dtype=np.int64, count=len(entries))
        values = np.fromiter((value for _, value in entries), dtype=np.float64, count=len(entries))
        possible = (ids >= 0) & (ids < self._vocab_size) & (values > -np.inf)
        ids, values = ids[possible], values[possible]
        order = np.argsort(-values, kind="stable")[: self._k]
        self._ids[position, : len(order)] = ids[order]
        self._values[position, : len(order)] = values[order]
        if own is not None:
            self._own[position] = own

    def scores(self) -> PromptScores:
        """Return the recorded scores."""
        return PromptScores(self._ids, self._values, self._own)


def log_prob(value: Any, where: str) -> float:
    """Return a log-probability of an answer.

    Args:
        value: A number, at most a rounding above 0; -9999 and the like stand for nothing.
        where: The part of the answer, for errors.

    Raises:
        EngineRefusalError: It is none.
    """
    number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if math.isnan(number) or number > MAX_LOG_PROB:
        raise EngineRefusalError(f"{where} of an answer is no log-probability: {str(value)[:50]!r}")
    return -math.inf if number <= NOTHING else min(number, 0.0)


MAX_LOG_PROB = 1e-3
"""Above 0 by rounding at most."""
NOTHING = -9999.0
"""Log-probability that servers write for tokens of no probability, since JSON has no infinity."""


def token_id(value: Any, where: str) -> int:
    """Return a token id of an answer.

    Args:
        value: An integer, as a number or as text.
        where: The part of the answer, for errors.

    Raises:
        EngineRefusalError: It is none.
    """
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40:
        return value
    raise EngineRefusalError(f"{where} of an answer is no token id: {str(value)[:50]!r}")


def items(value: Any, length: int, where: str) -> list[Any]:
    """Return a list of an answer.

    Args:
        value: The list.
        length: Its length.
        where: The part of the answer, for errors.

    Raises:
        EngineRefusalError: It is none, or of another length.
    """
    if not isinstance(value, list) or len(value) != length:
        raise EngineRefusalError(f"{where} of an answer is no list of {length} entries: check url_engine")
    return value


def member(value: Any, *path: str | int) -> Any:
    """Return a part of an answer by its path.

    Raises:
        EngineRefusalError: The answer has no such part.
    """
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError) as error:
            name = ".".join(map(str, path))
            raise EngineRefusalError(f"an answer lacks {name}: check url_engine") from error
    return value
