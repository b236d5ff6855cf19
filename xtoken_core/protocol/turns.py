"""Whose turn it is in a task: samples by their place in its order."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Sequence


class Turns:
    """Samples by place, lowest first. A sample has one place at a time.

    Most places come in ascending order and stand in a queue; only those of samples that come back need a heap. What is
    left over in either of a sample that has moved is dropped when its turn comes.
    """

    __slots__ = ("_ascending", "_late", "_place")

    def __init__(self) -> None:
        self._place: dict[int, int] = {}
        self._ascending: deque[tuple[int, int]] = deque()
        self._late: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """Entries, those that are left over included."""
        return len(self._ascending) + len(self._late)

    def add(self, sample_id: int, place: int) -> None:
        """Give a sample its place, and take away the one that it had."""
        if self._place.get(sample_id) == place:
            return
        self._place[sample_id] = place
        if not self._ascending or self._ascending[-1][0] < place:
            self._ascending.append((place, sample_id))
        else:
            heapq.heappush(self._late, (place, sample_id))

    def extend(self, ids: Sequence[int], first: int) -> None:
        """Give new samples the places from `first` on, above all that there are."""
        places = range(first, first + len(ids))
        self._place.update(zip(ids, places, strict=True))
        self._ascending.extend(zip(places, ids, strict=True))

    def pop(self) -> tuple[int, int] | None:
        """Take out the sample whose turn it is, with its place."""
        ascending, late, place_of = self._ascending, self._late, self._place
        while ascending or late:
            is_late = bool(late) and (not ascending or late[0] < ascending[0])
            place, sample_id = turn = heapq.heappop(late) if is_late else ascending.popleft()
            if place_of.get(sample_id) == place:
                del place_of[sample_id]
                return turn
        return None

    def prune(self, held: Container[int]) -> None:
        """Forget the samples that are not held, and all that is left over."""
        self._place = {i: place for i, place in self._place.items() if i in held}
        self._ascending = deque(sorted((place, i) for i, place in self._place.items()))
        self._late.clear()

    def clear(self) -> None:
        """Forget every sample."""
        self._place.clear()
        self._ascending.clear()
        self._late.clear()
