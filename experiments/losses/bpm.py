"""After BPM (arXiv 2607.22334): the teacher's mass on the longest student token that is a byte prefix."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from experiments.losses.base import ReferenceLoss, Side, divergence, floored_log
from experiments.losses.byte_prefixes import BytePrefixes


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

    def values(self, student: Side, teacher: Side) -> Tensor:
        """Return the sum of the KLs at a chunk's student positions."""
        result = student.log_p.new_zeros(len(student.first))
        for emitted, rows in self.events(student, teacher).items():
            chunk, own, other = torch.tensor(rows, device=result.device).unbind(1)
            target = self.target(emitted, teacher.log_p[other].exp())
            kl = divergence(target, floored_log(target), student.log_p[own])
            result = result.index_add(0, chunk, torch.where(target.sum(1) > 0, kl, 0.0))
        return result

    def target(self, emitted: bytes, p: Tensor) -> Tensor:
        """Return `[E, V_s]` targets at states where the student has emitted some bytes of the teacher's next token.

        Args:
            emitted: The bytes.
            p: `[E, V_t]` the teacher's next-token distributions.
        """
        beginnings = self.prefixes.after(emitted)
        mass = p[:, beginnings.teacher.to(p.device)]
        zeros = p.new_zeros(len(p), len(self.student_bytes))
        target = zeros.index_add(1, beginnings.student.to(p.device), mass)
        return target / target.sum(1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)

    def events(self, student: Side, teacher: Side) -> dict[bytes, list[tuple[int, int, int]]]:
        """Return chunk, student position and teacher position of every state, by the bytes emitted of its token."""
        found: dict[bytes, list[tuple[int, int, int]]] = defaultdict(list)
        for chunk in range(len(student.first)):
            own = student.tokens(chunk)
            text = b"".join(self.student_bytes[token] for token in own)
            starts, at = [0], 0
            for token in teacher.tokens(chunk)[:-1]:
                at += len(self.teacher_bytes[token])
                starts.append(at)
            at = 0
            for n, token in enumerate(own):
                behind = max(k for k, start in enumerate(starts) if start <= at)  # the teacher token that covers `at`
                places = int(student.first[chunk]) + n, int(teacher.first[chunk]) + behind
                found[text[starts[behind] : at]].append((chunk, *places))
                at += len(self.student_bytes[token])
        return found
