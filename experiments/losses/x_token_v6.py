"""After X-Token v6 (NVIDIA-NeMo/RL#4177): partitions into siblings and a rest, at a chunk's last position."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from experiments.losses.base import ReferenceLoss, Side, divergence, floored_log, shared_tokens
from xtoken_core.losses.alm import bernoulli_kl


class XTokenV6Loss(ReferenceLoss):
    """KL over a partition of the continuations that both sides can tell apart; ALM for m:n chunks.

    1:1: shared tokens and one class for the rest. Where one token x is spelled by the other side as y1..yn: the
    siblings of x, tokens with a spelling of n tokens that begins with y1..y(n-1), and one class for the rest. A
    sibling's probability is its own on the side of x; on the other side that of y1..y(n-1) times that of its last
    token there. Built from the thread's summary and a description in one sentence, hence "after".
    """

    def __init__(self, *arguments, **keywords) -> None:  # type: ignore[no-untyped-def]
        """Spell both vocabularies with each other's tokenizer; arguments as for `Loss`."""
        super().__init__(*arguments, **keywords)
        self.shared = shared_tokens(self.student_bytes, self.teacher_bytes)
        assert self.teacher.tokenizers is not None
        student, teacher = self.teacher.tokenizers()
        self.siblings = _siblings(self.student_bytes, teacher), _siblings(self.teacher_bytes, student)

    def values(self, student: Side, teacher: Side) -> Tensor:
        """Return the KL of each chunk's partition."""
        result = student.log_p.new_zeros(len(student.first))
        groups: dict[tuple[int, tuple[int, ...]] | None, list[int]] = defaultdict(list)
        likelihoods = []
        for chunk, sizes in enumerate(zip(student.size.tolist(), teacher.size.tolist(), strict=True)):
            if sizes == (1, 1):
                groups[None].append(chunk)
            elif 1 in sizes:
                holder = sizes.index(1)
                groups[holder, tuple((student, teacher)[1 - holder].tokens(chunk)[:-1])].append(chunk)
            else:
                likelihoods.append(chunk)
        for group, members in groups.items():
            chunks = torch.tensor(members, device=result.device)
            p, q = self._partition(group, student, teacher, chunks)
            result = result.index_add(0, chunks, divergence(p, floored_log(p), floored_log(q)))
        if likelihoods:
            chunks = torch.tensor(likelihoods, device=result.device)
            both = [side.likelihood(side.size[chunks], chunks) for side in (student, teacher)]
            q, p = (value / self.config.alm_temperature for value in both)
            result = result.index_add(0, chunks, bernoulli_kl(p, q))
        return result

    def _partition(
        self, group: tuple[int, tuple[int, ...]] | None, student: Side, teacher: Side, chunks: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the teacher's and the student's `[E, classes + 1]` probabilities."""
        sides = (student, teacher)
        if group is None:
            named = [side.log_p[side.first[chunks]][:, ids] for side, ids in zip(sides, self.shared, strict=True)]
        else:
            holder, path = group
            ids, last = self.siblings[holder].get((len(path) + 1, path), ([], []))
            one, many = sides[holder], sides[1 - holder]
            before = many.likelihood(many.size[chunks] - 1, chunks)
            held = one.log_p[one.first[chunks]][:, ids]
            spelled = many.log_p[many.first[chunks] + many.size[chunks] - 1][:, last] + before.unsqueeze(1)
            named = [held, spelled] if holder == 0 else [spelled, held]
        whole = [torch.cat([x.exp(), (1 - x.exp().sum(1, keepdim=True)).clamp(min=0)], dim=1) for x in named]
        return whole[1], whole[0]


def _siblings(pieces: list[bytes], tokenizer: object) -> dict[tuple[int, tuple[int, ...]], tuple[list[int], list[int]]]:
    """Return tokens and their last pieces, by the number of pieces and all but the last one."""
    found: dict[tuple[int, tuple[int, ...]], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for index, piece in enumerate(pieces):
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            continue  # a part of a character cannot be spelled alone
        spelling = tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()  # type: ignore[attr-defined]
        if len(spelling) > 1:
            tokens, last = found[len(spelling), spelling[:-1]]
            if spelling[-1] not in last:
                tokens.append(index)
                last.append(spelling[-1])
    return dict(found)
