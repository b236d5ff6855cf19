"""Names of the rows of a batch in a partition."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class KVBatchMeta:
    """Rows of a batch in a partition of the transfer queue.

    Attributes:
        partition: Partition that holds them.
        ids: One id per row, in the batch's order.
        fields: Columns written so far.
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
        """Return the number of rows."""
        return len(self.ids)
