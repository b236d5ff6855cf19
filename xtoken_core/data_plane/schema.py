"""What travels about a batch besides its tensors: where its rows are, and how they are to be laid out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Layout = Literal["padded", "jagged"]
"""`padded`: rectangular, filled up with a pad value. `jagged`: rows of their own length, in one buffer."""


@dataclass(frozen=True)
class KVBatchMeta:
    """Names the rows of a batch that lies in a partition of the transfer queue.

    Attributes:
        partition: The partition that holds them.
        ids: One id per row, in the batch's order.
        fields: The columns that were written so far.
        lengths: Tokens of each row, by which per-token columns are made jagged; None if they are not known.
    """

    partition: str
    ids: list[int]
    fields: list[str] = field(default_factory=list)
    lengths: list[int] | None = None

    def __post_init__(self) -> None:
        if self.lengths is not None and len(self.lengths) != len(self.ids):
            raise ValueError(f"{len(self.ids)} ids but {len(self.lengths)} lengths")

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.ids)
