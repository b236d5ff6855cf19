"""Flat layout of a batch: the student's rows, then the teacher's, in one array."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np


@dataclass(frozen=True)
class FlatLayout:
    """`2B` rows of `n` tokens: `B` of the student, each `widths[0]` long, then `B` of the teacher.

    Attributes:
        samples: `B`.
        widths: Tokens of a row of either side; neither is 0.
    """

    samples: int
    widths: tuple[int, int]

    @cached_property
    def split(self) -> int:
        """Index of the teacher's first token."""
        return self.samples * self.widths[0]

    @cached_property
    def first(self) -> np.ndarray:
        """`[2B]` int64: index of each row's first token."""
        steps = np.arange(self.samples)
        return np.concatenate([steps * self.widths[0], steps * self.widths[1] + self.split])

    @cached_property
    def last(self) -> np.ndarray:
        """`[2B]` int64: index of each row's last token."""
        last: np.ndarray = self.first + np.repeat(self.widths, self.samples) - 1
        return last

    @cached_property
    def head(self) -> np.ndarray:
        """`[2B, 8]` int64: indices of each row's first tokens, its last one again where it is shorter."""
        # Eight: text begins behind a BOS and a few markers of a template. Rows where it does not are scanned.
        head: np.ndarray = np.minimum(self.first[:, None] + np.arange(8), self.last[:, None])
        return head

    @cached_property
    def edges(self) -> np.ndarray:
        """`[4B]` int64: index of each row's first token, with room behind each."""
        # `reduceat` over pairs (begin, end): the sums of every other interval are those of the rows.
        return np.repeat(self.first, 2)

    def of(self, side: int) -> slice:
        """Return the rows of the student (0) or of the teacher (1)."""
        return slice(side * self.samples, (side + 1) * self.samples)

    def halves(self, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the student's `[B, T_s]` and the teacher's `[B, T_t]` part of an array over all tokens."""
        split, (student, teacher) = self.split, self.widths
        return flat[:split].reshape(-1, student), flat[split:].reshape(-1, teacher)

    def minus(self, flat: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return an array `[n]` over all tokens with each row's own of `[2B]` values subtracted."""
        result = np.empty_like(flat)
        parts = values.reshape(2, self.samples, 1)
        for half, given, part in zip(self.halves(result), self.halves(flat), parts, strict=True):
            np.subtract(given, part, out=half)
        return result


# Padded batches have few shapes, and every batch of one shape needs the same index arrays.
@lru_cache(maxsize=64)
def flat_layout(samples: int, student: int, teacher: int) -> FlatLayout:
    """Return the layout of a batch of this shape, cached."""
    return FlatLayout(samples, (student, teacher))
