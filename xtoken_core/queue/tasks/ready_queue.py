"""Whose turn it is in a task: samples by their place in its order."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Sequence


class ReadyQueue:
    """Samples by place, lowest first. A sample has one place at a time.

    Most places come in ascending order and stand in a queue, as the lists in which they came; only those of samples
    that come back need a heap. What is left over in either of a sample that has moved is dropped when its turn comes.
    """

    __slots__ = ("_ascending", "_at", "_late", "_length", "_place")

    def __init__(self) -> None:
        self._place: dict[int, int] = {}
        self._ascending: deque[tuple[Sequence[int], Sequence[int]]] = deque()
        self._at = 0
        self._length = 0
        self._late: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """Entries, those that are left over included."""
        return self._length + len(self._late)

    def add(self, sample_id: int, place: int) -> None:
        """Give a sample its place, and take away the one that it had."""
        if self._place.get(sample_id) == place:
            return
        if not self._ascending or self._ascending[-1][0][-1] < place:
            self.extend([sample_id], [place])
        else:
            self._place[sample_id] = place
            heapq.heappush(self._late, (place, sample_id))

    def extend(self, ids: Sequence[int], places: Sequence[int]) -> None:
        """Give new samples ascending places above all that there are; the lists are kept, and must stay as they are."""
        if ids:
            self._place.update(zip(ids, places, strict=True))
            self._ascending.append((places, ids))
            self._length += len(ids)

    def pop(self) -> tuple[int, int] | None:
        """Take out the sample whose turn it is, with its place."""
        late, place_of = self._late, self._place
        while self._ascending or late:
            turn = self._first() if self._ascending else late[0]
            if late and late[0] <= turn:
                turn = heapq.heappop(late)
            else:
                self._step()
            place, sample_id = turn
            if place_of.get(sample_id) == place:
                del place_of[sample_id]
                return turn
        return None

    def prune(self, held: Container[int]) -> None:
        """Forget the samples that are not held, and all that is left over."""
        turns = sorted((place, i) for i, place in self._place.items() if i in held)
        self.clear()
        self.extend([i for _, i in turns], [place for place, _ in turns])

    def clear(self) -> None:
        """Forget every sample."""
        self._place.clear()
        self._ascending.clear()
        self._late.clear()
        self._at = self._length = 0

    def _first(self) -> tuple[int, int]:
        places, ids = self._ascending[0]
        return places[self._at], ids[self._at]

    def _step(self) -> None:
        """Past the first entry of the queue."""
        self._at += 1
        self._length -= 1
        if self._at == len(self._ascending[0][0]):
            self._ascending.popleft()
            self._at = 0
