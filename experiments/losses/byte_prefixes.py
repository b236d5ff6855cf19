"""Longest byte prefixes: which student token begins a teacher's token, and what is then still to be spelled."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Beginnings:
    """The teacher's tokens that begin with some bytes, by what the student writes next.

    Attributes:
        teacher: `[n]` ids, each longer than those bytes.
        student: `[n]` the longest student token with which the rest of each begins.
        rest: The bytes of each behind that token; empty: none.
        tokens: `[m]` the student tokens among them, each once.
        token_of: `[n]` where each one's student token is in `tokens`.
    """

    teacher: Tensor
    student: Tensor
    rest: tuple[bytes, ...]
    tokens: Tensor
    token_of: Tensor


class Rests(NamedTuple):
    """What teacher tokens leave to be spelled after a student token: rests that a student token begins with.

    Attributes:
        start: `[m]` where the tokens that begin with a rest start in `BytePrefixes.student_order`.
        end: `[m]` where they end.
        teacher: `[n]` the teacher's tokens.
        rest: `[n]` the rest of each.
    """

    start: Tensor
    end: Tensor
    teacher: Tensor
    rest: Tensor


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
        self._rests: dict[tuple[bytes, int], Rests] = {}

    @cached_property
    def _by_beginning(self) -> tuple[list[bytes], list[int]]:
        return _sorted(self.teacher)

    @cached_property
    def student_order(self) -> tuple[list[bytes], list[int]]:
        """The student's tokens that spell something, in the order of their bytes, and their ids."""
        return _sorted(self.student)

    def longest(self, data: bytes) -> int:
        """Return the longest student token with which the bytes begin; -1: there is none."""
        lengths = range(min(len(data), self._longest), 0, -1)
        return next((self._ids[data[:n]] for n in lengths if data[:n] in self._ids), -1)

    def after(self, emitted: bytes) -> Beginnings:
        """Return the teacher's tokens that continue some bytes."""
        if emitted not in self._known:
            pieces, ids = self._by_beginning
            rows = []
            for n in range(*beginning_with(pieces, emitted)):
                rest = pieces[n][len(emitted) :]
                token = self.longest(rest) if rest else -1
                if token >= 0:
                    rows.append((ids[n], token, rest[len(self.student[token]) :]))
            teacher, student = (torch.tensor([row[i] for row in rows], dtype=torch.int64) for i in (0, 1))
            tokens, token_of = student.unique(return_inverse=True)
            self._known[emitted] = Beginnings(teacher, student, tuple(row[2] for row in rows), tokens, token_of)
        return self._known[emitted]

    def rests(self, emitted: bytes, token: int) -> Rests:
        """Return the unspelled rests of the teacher's tokens after some bytes and a student token."""
        key = emitted, token
        if key not in self._rests:
            beginnings = self.after(emitted)
            numbers: dict[bytes, int] = {}
            ranges, rows = [], []
            for n in torch.nonzero(beginnings.student == token).flatten().tolist():
                rest = beginnings.rest[n]
                start, end = self.continuing(rest) if rest else (0, 0)
                if end > start:
                    if rest not in numbers:
                        numbers[rest] = len(ranges)
                        ranges.append((start, end))
                    rows.append((int(beginnings.teacher[n]), numbers[rest]))
            columns = [torch.tensor(each, dtype=torch.int64).view(-1, 2).unbind(1) for each in (ranges, rows)]
            self._rests[key] = Rests(*columns[0], *columns[1])
        return self._rests[key]

    def continuing(self, data: bytes) -> tuple[int, int]:
        """Return the range of `student_order` in which tokens begin with some bytes."""
        return beginning_with(self.student_order[0], data)


def _sorted(pieces: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
    rows = sorted((piece, index) for index, piece in enumerate(pieces) if piece)
    return [piece for piece, _ in rows], [index for _, index in rows]


def beginning_with(pieces: Sequence[bytes], data: bytes) -> tuple[int, int]:
    """Return the range of sorted pieces that begin with some bytes."""
    start = bisect_left(pieces, data)
    return start, bisect_right(pieces, data, lo=start, key=lambda piece: piece[: len(data)])
