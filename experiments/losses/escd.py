"""After ESCD (arXiv 2609.34738): BPM, and the rest of the teacher's tokens at the next student state."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.losses.base import Side, Tokens, floored_log
from experiments.losses.bpm import BPMLoss


class GroupRests(NamedTuple):
    """Rests of a group's states, `m` in all, spelled by `n` teacher tokens.

    Attributes:
        chunk: `[m]` the chunk.
        next_row: `[m]` the student's position after its own token.
        start: `[m]` where tokens that begin with the rest start in the order of the student's tokens.
        end: `[m]` where they end.
        row: `[n]` the teacher's position.
        token: `[n]` the teacher's token.
        rest: `[n]` its rest.
    """

    chunk: Tensor
    next_row: Tensor
    start: Tensor
    end: Tensor
    row: Tensor
    token: Tensor
    rest: Tensor


class ESCDLoss(BPMLoss):
    """BPM plus `-M log sum q(u)` at the state after each student token.

    Of a teacher token whose longest student prefix is the text's own student token, the rest is still to be spelled.
    `M` is the teacher's mass on the tokens with this rest, `u` runs over student tokens whose bytes begin with it; a
    rest that no student token begins with is left out. Built from a description in one sentence, hence "after".
    """

    whole_samples = True  # the state after a chunk's last token is beside the chunk

    def __init__(self, *arguments, **keywords) -> None:  # type: ignore[no-untyped-def]
        """Order the student's tokens by their bytes; arguments as for `Loss`."""
        super().__init__(*arguments, **keywords)
        self.order = torch.tensor(self.prefixes.student_order[1]).to(self.device)

    def prepare(self, student: Tokens, teacher: Tokens) -> Any:
        """Return BPM's states and the rests."""
        every = list(self.states(student, teacher))
        states = [state for state in every if student.has_next(state.student)]
        found = [self.prefixes.rests(state.emitted, student.targets[state.student]) for state in states]
        heads, tails = (torch.tensor([len(each[n]) for each in found], dtype=torch.int64) for n in (0, 2))
        where = torch.tensor([state[1:] for state in states], dtype=torch.int64).view(-1, 3)
        before = heads.cumsum(0) - heads
        nothing = [torch.zeros(0, dtype=torch.int64)]
        start, end, token, rest = (torch.cat([each[n] for each in found] or nothing) for n in range(4))
        columns = (
            where[:, 0].repeat_interleave(heads),
            (where[:, 1] + 1).repeat_interleave(heads),
            start,
            end,
            where[:, 2].repeat_interleave(tails),
            token,
            rest + before.repeat_interleave(tails),
        )
        return self.prepare_states(every), GroupRests(*(column.to(self.device) for column in columns))

    def values(self, student: Side, teacher: Side, prepared: Any) -> Tensor:
        """Return the sum of BPM's KLs and of the terms of the rests."""
        states, rests = prepared
        result = super().values(student, teacher, states)
        mass = teacher.entries(rests.row, rests.token).exp()
        mass = mass.new_zeros(len(rests.chunk)).index_add(0, rests.rest, mass)
        counts = rests.end - rests.start
        index = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        place = torch.arange(len(index), device=counts.device) - (counts.cumsum(0) - counts)[index]
        q = student.entries(rests.next_row[index], self.order[rests.start[index] + place]).exp()
        q = q.new_zeros(len(counts)).index_add(0, index, q)
        return result.index_add(0, rests.chunk, -mass * floored_log(q))
