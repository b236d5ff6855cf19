"""After BPM (arXiv 2607.22334): the teacher's mass on the longest student token that is a byte prefix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.losses.base import LOWEST, ReferenceLoss, Side, Tokens, divergence, floored_log
from experiments.losses.byte_prefixes import BytePrefixes


class State(NamedTuple):
    """A state of the student in a chunk.

    Attributes:
        emitted: The bytes of the teacher's next token that the student has written.
        chunk: The chunk.
        student: The student's position.
        teacher: The teacher's.
    """

    emitted: bytes
    chunk: int
    student: int
    teacher: int


@dataclass(frozen=True)
class Inner:
    """All states of a group inside a teacher token, with the teacher's tokens that continue each.

    Attributes:
        chunk: `[E]` their chunks.
        row: `[n]` the teacher's position of each continuation.
        token: `[n]` its teacher token.
        slot: `[n]` its target.
        state: `[m]` the state of each target.
        own_row: `[m]` the student's position of it.
        own_token: `[m]` its student token.
    """

    chunk: Tensor
    row: Tensor
    token: Tensor
    slot: Tensor
    state: Tensor
    own_row: Tensor
    own_token: Tensor


class BPMLoss(ReferenceLoss):
    """KL at every student position of a chunk, summed.

    Where both sides begin a token, every teacher token gives its mass to the longest student token with which its bytes
    begin. Inside a teacher token the teacher's distribution is conditioned on the bytes that the student has emitted:
    only tokens that begin with them count, by what the student writes next. Tokens without a student token are left
    out and the rest is renormalised. Built from a description in one sentence, hence "after".
    """

    def __init__(self, *arguments, **keywords) -> None:  # type: ignore[no-untyped-def]
        """Index both vocabularies; arguments as for `Loss`."""
        super().__init__(*arguments, **keywords)
        self.prefixes = BytePrefixes(self.student_bytes, self.teacher_bytes)

    @cached_property
    def _first(self) -> tuple[Tensor, Tensor]:
        """The teacher's tokens that a student token begins, and that token, where nothing has been emitted."""
        beginnings = self.prefixes.after(b"")
        return beginnings.teacher.to(self.device), beginnings.student.to(self.device)

    def prepare(self, student: Tokens, teacher: Tokens) -> Any:
        """Return the result of `prepare_states`."""
        return self.prepare_states(self.states(student, teacher))

    def prepare_states(self, states: Iterable[State]) -> tuple[Tensor, Inner | None]:
        """Return the states where both sides begin a token, `[E, 3]`, and those inside a teacher token."""
        starts, inner = [], []
        for state in states:
            (inner if state.emitted else starts).append(state)
        rows = torch.tensor([state[1:] for state in starts], dtype=torch.int64).view(-1, 3)
        return rows.to(self.device), self._inner(inner)

    def values(self, student: Side, teacher: Side, prepared: Any) -> Tensor:
        """Return the sum of the KLs at a chunk's student positions."""
        starts, inner = prepared
        result = student.log_p.new_zeros(len(student.first))
        chunk, own, other = starts.unbind(1)
        tokens, begun_by = self._first
        mass = teacher.log_p[other][:, tokens].exp_()
        target = mass.new_zeros(len(chunk), len(self.student_bytes))
        target.index_add_(1, begun_by, mass)
        del mass
        total = target.sum(1, keepdim=True)
        target /= total.clamp(min=torch.finfo(target.dtype).tiny)
        kl = divergence(target, floored_log(target), student.log_p[own])
        result = result.index_add(0, chunk, torch.where(total.squeeze(1) > 0, kl, 0.0))
        if inner is not None:
            result = result.index_add(0, inner.chunk, self._inner_kl(student, teacher, inner))
        return result

    def _inner(self, states: list[State]) -> Inner | None:
        if not states:
            return None
        found = [self.prefixes.after(state.emitted) for state in states]
        counts = torch.tensor([len(each.teacher) for each in found])
        slots = torch.tensor([len(each.tokens) for each in found])
        before = slots.cumsum(0) - slots
        columns = (
            torch.tensor([state.chunk for state in states]),
            torch.tensor([state.teacher for state in states]).repeat_interleave(counts),
            torch.cat([each.teacher for each in found]),
            torch.cat([each.token_of for each in found]) + before.repeat_interleave(counts),
            torch.arange(len(states)).repeat_interleave(slots),
            torch.tensor([state.student for state in states]).repeat_interleave(slots),
            torch.cat([each.tokens for each in found]),
        )
        return Inner(*(column.to(self.device) for column in columns))

    def _inner_kl(self, student: Side, teacher: Side, inner: Inner) -> Tensor:
        """Return `[E]` KLs of the conditioned distributions at the states inside a teacher token."""
        mass = teacher.entries(inner.row, inner.token).exp()
        target = mass.new_zeros(len(inner.state)).index_add(0, inner.slot, mass)
        total = mass.new_zeros(len(inner.chunk)).index_add(0, inner.state, target)
        target = target / total[inner.state].clamp(min=torch.finfo(mass.dtype).tiny)
        log_q = student.entries(inner.own_row, inner.own_token).clamp(min=LOWEST)
        terms = target * (floored_log(target).clamp(min=LOWEST) - log_q)
        kl = mass.new_zeros(len(inner.chunk)).index_add(0, inner.state, terms)
        return torch.where(total > 0, kl, 0.0)

    def states(self, student: Tokens, teacher: Tokens) -> Iterator[State]:
        """Yield the state at every student position of every chunk."""
        for chunk in range(len(student.first)):
            own, first, behind = student.of(chunk), student.first[chunk], teacher.first[chunk]
            if len(own) == 1:
                yield State(b"", chunk, first, behind)
                continue
            text = b"".join([self.student_bytes[token] for token in own])
            ends, at = [], 0
            for token in teacher.of(chunk):
                at += len(self.teacher_bytes[token])
                ends.append(at)
            at = covering = 0
            for n, token in enumerate(own):
                while covering + 1 < len(ends) and ends[covering] <= at:
                    covering += 1
                start = ends[covering - 1] if covering else 0
                yield State(text[start:at], chunk, first + n, behind + covering)
                at += len(self.student_bytes[token])
