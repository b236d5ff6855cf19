"""After ESCD (arXiv 2609.34738): BPM, and the rest of the teacher's tokens at the next student state."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from experiments.losses.base import Side, floored_log
from experiments.losses.bpm import BPMLoss


class ESCDLoss(BPMLoss):
    """BPM plus `-M log sum q(u)` at the state after each student token.

    Of a teacher token whose longest student prefix is the text's own student token, the rest is still to be spelled.
    `M` is the teacher's mass on the tokens with this rest, `u` runs over student tokens whose bytes begin with it; a
    rest that no student token begins with is left out. Built from a description in one sentence, hence "after".
    """

    whole_samples = True  # the state after a chunk's last token is beside the chunk

    def values(self, student: Side, teacher: Side) -> Tensor:
        """Return the sum of BPM's KLs and of the terms of the rests."""
        result = super().values(student, teacher)
        for emitted, rows in self.events(student, teacher).items():
            for token, events in self._by_token(rows, student).items():
                chunk, own, other = torch.tensor(events, device=result.device).unbind(1)
                for rest, ids in self._rests(emitted, token).items():
                    mass = teacher.log_p[other][:, ids.to(result.device)].exp().sum(1)
                    q = student.log_p[own + 1][:, self.prefixes.continuing(rest).to(result.device)].exp().sum(1)
                    result = result.index_add(0, chunk, -mass * floored_log(q))
        return result

    def _by_token(self, rows: list[tuple[int, int, int]], student: Side) -> dict[int, list[tuple[int, int, int]]]:
        """Group states that have a next state in their sample by the text's own token."""
        found: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for chunk, own, other in rows:
            if (own + 1) % student.width:
                found[int(student.targets[own])].append((chunk, own, other))
        return found

    def _rests(self, emitted: bytes, token: int) -> dict[bytes, Tensor]:
        """Return the teacher's tokens by what is still to be spelled after a student token."""
        beginnings, found = self.prefixes.after(emitted), defaultdict(list)
        for teacher, own, rest in zip(
            beginnings.teacher.tolist(), beginnings.student.tolist(), beginnings.rest, strict=True
        ):
            if own == token and rest and len(self.prefixes.continuing(rest)):
                found[rest].append(teacher)
        return {rest: torch.tensor(ids) for rest, ids in found.items()}
