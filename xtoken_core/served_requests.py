"""Counts of the requests to a teacher's servers or store, from its worker to the trainer beside each signal."""

from __future__ import annotations

import struct
from collections.abc import Iterable, MutableMapping
from operator import add, sub
from typing import NamedTuple

from xtoken_core.schema import TEACHER_REQUESTS, field_name
from xtoken_core.wire import Column

_ROW = struct.Struct("<4q")


class RequestCounts(NamedTuple):
    """Counts over some micro-batches.

    Attributes:
        requests: Requests that were answered, or records that were read.
        retries: Requests that were repeated.
        received: Bytes of the answers, or compressed ones of the records.
        waited_s: Seconds that the teacher's worker has waited for them.
    """

    requests: int = 0
    retries: int = 0
    received: int = 0
    waited_s: float = 0.0

    def plus(self, other: RequestCounts) -> RequestCounts:
        """Return the sum of two counts."""
        return RequestCounts(*map(add, self, other))

    def less(self, earlier: RequestCounts) -> RequestCounts:
        """Return the counts since earlier ones."""
        return RequestCounts(*map(sub, self, earlier))

    def column(self, rows: int) -> Column:
        """Return the column of a micro-batch.

        Args:
            rows: Its samples, at least one; the first has the counts.
        """
        first = _ROW.pack(self.requests, self.retries, self.received, round(self.waited_s * 1e6))
        values = memoryview(first + bytes((rows - 1) * _ROW.size))
        return Column("dense", TEACHER_REQUESTS.dtype, rows, (4,), values)

    def of_store(self) -> dict[str, float | int]:
        """Return the columns of `steps.jsonl` for stored teachers."""
        waited = round(self.waited_s, 6)
        return {"store_hits": self.requests, "store_bytes": self.received, "store_wait_seconds": waited}

    def of_servers(self) -> dict[str, float | int]:
        """Return the columns of `steps.jsonl` for served teachers."""
        return {
            "served_requests": self.requests,
            "served_retries": self.retries,
            "served_bytes": self.received,
            "served_wait_seconds": round(self.waited_s, 6),
        }


def requests_field(teacher: int) -> str:
    """Return the name of a teacher's column."""
    return field_name(TEACHER_REQUESTS, teacher)


def take_requests(columns: MutableMapping[str, Column], teachers: Iterable[int]) -> RequestCounts:
    """Remove the counts from a claim's columns, and return their sum over some teachers.

    Args:
        columns: The claim's.
        teachers: Their numbers.
    """
    total = RequestCounts()
    for teacher in teachers:
        column = columns.pop(requests_field(teacher), None)
        if column is not None and column.item_shape == (4,) and column.dtype == TEACHER_REQUESTS.dtype:
            for requests, retries, received, waited in _ROW.iter_unpack(column.values):
                total = total.plus(RequestCounts(requests, retries, received, waited / 1e6))
    return total
