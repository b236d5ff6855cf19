"""The records of several texts, numbered as one."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from xtoken_core.dataset.index import DataIndex
from xtoken_core.dataset.pieces import PieceIndex
from xtoken_core.dataset.records import BadRecord, Record


class JoinedIndex:
    """Indices of several texts as one: records are numbered from 0, those of the first text first.

    Args:
        parts: Index of each text.
    """

    def __init__(self, parts: Sequence[DataIndex | PieceIndex]) -> None:
        self.parts = tuple(parts)
        self._starts = [0, *accumulate(map(len, self.parts))]
        contents = json.dumps([part.fingerprint for part in self.parts])
        self.fingerprint: str = hashlib.sha256(contents.encode()).hexdigest()
        """SHA-256, in hex, of the parts' fingerprints in order."""

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, record_numbers: Sequence[int]) -> list[Record | BadRecord]:
        """Return the records with these numbers, in this order; raises as `DataIndex.read`."""
        return [self._read_one(number) for number in record_numbers]

    def location(self, number: int) -> str:
        """Return the location of a record as `file:line`, as `DataIndex.location` does."""
        part, own = self._locate(number)
        return self.parts[part].location(own)

    def first_conversation(self) -> str | None:
        """Return the location of the first file that begins with `messages`, as `DataIndex.first_conversation`."""
        return next((found for part in self.parts if (found := part.first_conversation()) is not None), None)

    def documents(self) -> Iterator[str]:
        """Yield every usable record in order, as plain text."""
        for part in self.parts:
            yield from part.documents()

    def _read_one(self, number: int) -> Record | BadRecord:
        part, own = self._locate(number)
        (record,) = self.parts[part].read([own])
        return replace(record, number=number)

    def _locate(self, number: int) -> tuple[int, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"there is no record {number} among {len(self)}")
        part = bisect_right(self._starts, number) - 1
        return part, number - self._starts[part]


TextIndex = DataIndex | PieceIndex | JoinedIndex
"""The records of a run."""
