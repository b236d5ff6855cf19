"""Document lengths of real text, drawn from a seed: log-normal, cut at the context."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

SIGMA = 1.0
"""Standard deviation of the logarithm of the lengths."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of document lengths, in tokens.

    Attributes:
        median: Of the documents before they are cut.
        context: Longer documents are cut to this.
    """

    median: int
    context: int

    def draw(self, rng: random.Random, count: int) -> list[int]:
        """Return the lengths of some documents."""
        drawn = (rng.lognormvariate(math.log(self.median), SIGMA) for _ in range(count))
        return [max(1, min(self.context, round(length))) for length in drawn]


DISTRIBUTIONS = {"text": Lengths(400, 2048), "chat": Lengths(250, 4096)}
