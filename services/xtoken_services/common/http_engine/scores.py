"""Log-probabilities of a text's tokens as a server gives them, by the position that predicts each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float, Int
from msgspec import Meta

from xtoken_services.common.http_engine.errors import EngineRefusalError

TokenId = Annotated[int, Meta(ge=0, lt=1 << 40)]
"""Token id of an answer."""
MAX_LOG_PROB = 1e-3
LogProb = Annotated[float, Meta(le=MAX_LOG_PROB)]
"""Log-probability of an answer; above 0 by rounding at most."""
NOTHING = -9999.0
"""Log-probability that servers write for tokens of no probability, since JSON has no infinity."""
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
        self.add_rows(
            position, np.array([[token for token, _ in entries]], dtype=np.int64), np.array([[x for _, x in entries]])
        )
        if own is not None:
            self.add_own(position, own)

    def add_own(self, position: int, own: float) -> None:
        """Record the log-probability of the token that follows a position."""
        self._own[position] = -np.inf if own <= NOTHING else min(own, 0.0)

    def add_rows(self, first: int, ids: Int[np.ndarray, "rows n"], values: Float[np.ndarray, "rows n"]) -> None:
        """Record the tokens of several positions, from `first` on; see `add`."""
        possible = (ids >= 0) & (ids < self._vocab_size) & (values > NOTHING)
        ids, values = np.where(possible, ids, -1), np.where(possible, np.minimum(values, 0.0), -np.inf)
        order = np.argsort(-values, axis=1, kind="stable")[:, : self._k]
        part = slice(first, first + len(ids)), slice(0, order.shape[1])
        self._ids[part] = np.take_along_axis(ids, order, axis=1)
        self._values[part] = np.take_along_axis(values, order, axis=1)

    def scores(self) -> PromptScores:
        """Return the recorded scores."""
        return PromptScores(self._ids, self._values, self._own)


def token_id(name: str) -> int:
    """Return the token id in a token's name, `token_id:N`, or -1 for another name."""
    digits = name.removeprefix("token_id:")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 12 else -1


def check_length(value: Sequence[Any], length: int, where: str) -> None:
    """Refuse a list of an answer that has another length.

    Raises:
        EngineRefusalError: It has.
    """
    if len(value) != length:
        raise EngineRefusalError(f"{where} of an answer has {len(value)} entries, not {length}: check url_engine")
