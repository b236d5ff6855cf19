"""Set of integers stored as intervals, compact for long runs of finished positions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence


class IntervalSet:
    """Integers kept as sorted, disjoint, non-adjacent half-open intervals."""

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int | None = None) -> None:
        """Add `start`, or all of `[start, stop)`."""
        stop = start + 1 if stop is None else stop
        if stop <= start:
            return
        # Neighbours count as one: intervals that only touch are merged, so that a long run stays a single one.
        low = bisect_right(self._stops, start - 1)
        high = bisect_right(self._starts, stop)
        if low < high:
            start = min(start, self._starts[low])
            stop = max(stop, self._stops[high - 1])
        self._starts[low:high] = [start]
        self._stops[low:high] = [stop]

    def add_all(self, values: Iterable[int]) -> None:
        """Add distinct integers; a contiguous range is added at once."""
        ordered = sorted(values)
        if ordered and ordered[-1] - ordered[0] + 1 == len(ordered):
            self.add(ordered[0], ordered[-1] + 1)
        else:
            for value in ordered:  # in order, so that intervals grow at their end
                self.add(value)

    def isdisjoint(self, values: Sequence[int]) -> bool:
        """Return whether none of `values` is in the set."""
        # Most puts lie above everything finished: one look decides before any loop.
        at = bisect_right(self._starts, max(values, default=-1)) - 1
        return at < 0 or self._stops[at] <= min(values) or not any(value in self for value in values)

    def __contains__(self, value: int) -> bool:
        at = bisect_right(self._starts, value) - 1
        return at >= 0 and value < self._stops[at]

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.intervals())

    def first_gap(self, start: int = 0) -> int:
        """Return the lowest integer from `start` on that is not in the set."""
        at = bisect_right(self._starts, start) - 1
        return self._stops[at] if at >= 0 and start < self._stops[at] else start

    def count_intervals(self) -> int:
        """Return the number of intervals."""
        return len(self._starts)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Return the intervals, ascending."""
        return zip(self._starts, self._stops, strict=True)
