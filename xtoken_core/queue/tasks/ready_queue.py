"""Priority queue of sample ids, fast for keys that come in ascending order."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Sequence


class ReadyQueue:
    """Sample ids by key, lowest first; a sample has one key at a time.

    Most keys come in ascending order and are kept as the lists in which they came; only those of samples that come back
    need a heap. An entry that became stale because its sample got another key is skipped when it is reached.
    """

    __slots__ = ("_ascending", "_at", "_key_of", "_late", "_length")

    def __init__(self) -> None:
        self._key_of: dict[int, int] = {}
        self._ascending: deque[tuple[Sequence[int], Sequence[int]]] = deque()
        self._at = 0
        self._length = 0
        self._late: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """Return the number of entries, stale ones included."""
        return self._length + len(self._late)

    def add(self, sample_id: int, key: int) -> None:
        """Set the key of a sample, in place of the one it had."""
        if self._key_of.get(sample_id) == key:
            return
        # Above all others: appended in constant time. Only samples that come back take the heap.
        if not self._ascending or self._ascending[-1][0][-1] < key:
            self.extend([sample_id], [key])
        else:
            self._key_of[sample_id] = key
            heapq.heappush(self._late, (key, sample_id))

    def extend(self, ids: Sequence[int], keys: Sequence[int]) -> None:
        """Add samples with ascending keys above all others; both sequences are kept and must not change."""
        if ids:
            self._key_of.update(zip(ids, keys, strict=True))
            self._ascending.append((keys, ids))
            self._length += len(ids)

    def pop(self) -> tuple[int, int] | None:
        """Remove and return the lowest key and its sample."""
        late, key_of = self._late, self._key_of
        while self._ascending or late:
            entry = self._first() if self._ascending else late[0]
            if late and late[0] <= entry:
                entry = heapq.heappop(late)
            else:
                self._advance()
            key, sample_id = entry
            # Otherwise stale: the sample got another key, or has left, since this entry was made.
            if key_of.get(sample_id) == key:
                del key_of[sample_id]
                return entry
        return None

    def prune(self, held: Container[int]) -> None:
        """Remove samples that are not held, and all stale entries."""
        entries = sorted((key, i) for i, key in self._key_of.items() if i in held)
        self.clear()
        self.extend([i for _, i in entries], [key for key, _ in entries])

    def clear(self) -> None:
        """Remove every sample."""
        self._key_of.clear()
        self._ascending.clear()
        self._late.clear()
        self._at = self._length = 0

    def _first(self) -> tuple[int, int]:
        keys, ids = self._ascending[0]
        return keys[self._at], ids[self._at]

    def _advance(self) -> None:
        """Move past the first entry of the ascending lists."""
        self._at += 1
        self._length -= 1
        if self._at == len(self._ascending[0][0]):
            self._ascending.popleft()
            self._at = 0
