"""Longest byte prefixes: which student token begins a teacher's token, and what is then still to be spelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Beginnings:
    """The teacher's tokens that begin with some bytes, by what the student writes next.

    Attributes:
        teacher: `[n]` ids, each longer than those bytes.
        student: `[n]` the longest student token with which the rest of each begins.
        rest: The bytes of each behind that token; empty: none.
    """

    teacher: Tensor
    student: Tensor
    rest: tuple[bytes, ...]


class BytePrefixes:
    """Both vocabularies by their bytes.

    Args:
        student: By id, bytes.
        teacher: Likewise.
    """

    def __init__(self, student: Sequence[bytes], teacher: Sequence[bytes]) -> None:
        self.student, self.teacher = student, teacher
        self._ids = {piece: index for index, piece in reversed(list(enumerate(student))) if piece}
        self._longest = max(map(len, self._ids), default=0)
        self._known: dict[bytes, Beginnings] = {}
        self._continuing: dict[bytes, Tensor] = {}

    @cached_property
    def _by_beginning(self) -> list[tuple[bytes, int]]:
        return sorted((piece, index) for index, piece in enumerate(self.teacher) if piece)

    def longest(self, data: bytes) -> int:
        """Return the longest student token with which the bytes begin; -1: there is none."""
        lengths = range(min(len(data), self._longest), 0, -1)
        return next((self._ids[data[:n]] for n in lengths if data[:n] in self._ids), -1)

    def after(self, emitted: bytes) -> Beginnings:
        """Return the teacher's tokens that continue some bytes."""
        if emitted not in self._known:
            rows = []
            for piece, index in self._by_beginning:
                if piece.startswith(emitted) and len(piece) > len(emitted):
                    rest = piece[len(emitted) :]
                    token = self.longest(rest)
                    if token >= 0:
                        rows.append((index, token, rest[len(self.student[token]) :]))
            teacher, student = (torch.tensor([row[i] for row in rows], dtype=torch.int64) for i in (0, 1))
            self._known[emitted] = Beginnings(teacher, student, tuple(row[2] for row in rows))
        return self._known[emitted]

    def continuing(self, data: bytes) -> Tensor:
        """Return the ids of student tokens that begin with some bytes."""
        if data not in self._continuing:
            ids = [index for index, piece in enumerate(self.student) if piece.startswith(data)]
            self._continuing[data] = torch.tensor(ids, dtype=torch.int64)
        return self._continuing[data]
