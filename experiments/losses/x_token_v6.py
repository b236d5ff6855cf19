"""After X-Token v6 (NVIDIA-NeMo/RL#4177): partitions into siblings and a rest, at a chunk's last position."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.losses.base import LOWEST, ReferenceLoss, Side, Tokens, divergence, floored_log
from xtoken_core.losses.alm import bernoulli_kl

Spelled = tuple[Tensor, Tensor]
"""Siblings and the last piece of each, `[n]` ids."""


class Siblings(NamedTuple):
    """Siblings of all chunks that are one token of one side and several of the other, `n` in all.

    Attributes:
        chunk: `[E]` the chunks.
        of: `[n]` the chunk's number among these.
        held: `[n]` the sibling, a token of the side with one.
        last: `[n]` the last piece of its spelling by the other side.
    """

    chunk: Tensor
    of: Tensor
    held: Tensor
    last: Tensor


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
        assert self.teacher.tokenizers is not None
        student, teacher = self.teacher.tokenizers()
        self.siblings = _siblings(self.student_bytes, teacher), _siblings(self.teacher_bytes, student)

    def prepare(self, student: Tokens, teacher: Tokens) -> Any:
        """Return the chunks of one token on both sides, the siblings by the side with one, and all other chunks."""
        ones: list[int] = []
        several: list[int] = []
        holders: tuple[list[int], list[int]] = ([], [])
        for chunk, sizes in enumerate(zip(student.size, teacher.size, strict=True)):
            (ones if sizes == (1, 1) else holders[sizes.index(1)] if 1 in sizes else several).append(chunk)
        siblings = [self._of_chunks(n, (teacher, student)[n], chunks) for n, chunks in enumerate(holders)]
        index = [torch.tensor(each, dtype=torch.int64).to(self.device) for each in (ones, several)]
        return index[0], siblings, index[1]

    def _of_chunks(self, holder: int, other: Tokens, chunks: list[int]) -> Siblings:
        nothing = torch.zeros(0, dtype=torch.int64)
        found = []
        for chunk in chunks:
            path = tuple(other.of(chunk)[:-1])
            found.append(self.siblings[holder].get((len(path) + 1, path), (nothing, nothing)))
        counts = torch.tensor([len(ids) for ids, _ in found], dtype=torch.int64)
        held, last = (torch.cat([nothing, *(each[n] for each in found)]) for n in (0, 1))
        columns = torch.tensor(chunks, dtype=torch.int64), torch.arange(len(chunks)).repeat_interleave(counts)
        return Siblings(*(column.to(self.device) for column in (*columns, held, last)))

    def values(self, student: Side, teacher: Side, prepared: Any) -> Tensor:
        """Return the KL of each chunk's partition."""
        ones, siblings, several = prepared
        sides = student, teacher
        result = student.log_p.new_zeros(len(student.first))
        named = [side.log_p[side.first[ones]][:, ids] for side, ids in zip(sides, self.shared, strict=True)]
        q, p = (torch.cat([x.exp(), _rest(x.exp().sum(1)).unsqueeze(1)], dim=1) for x in named)
        result = result.index_add(0, ones, divergence(p, floored_log(p), floored_log(q)))
        for holder, each in enumerate(siblings):
            one, many = sides[holder], sides[1 - holder]
            before = many.likelihood(many.size[each.chunk] - 1, each.chunk)
            held = one.entries(one.first[each.chunk][each.of], each.held)
            end = many.first[each.chunk] + many.size[each.chunk] - 1
            spelled = many.entries(end[each.of], each.last) + before[each.of]
            q, p = (held.exp(), spelled.exp()) if holder == 0 else (spelled.exp(), held.exp())
            zeros = p.new_zeros(len(each.chunk))
            rest_q, rest_p = (_rest(zeros.index_add(0, each.of, x)) for x in (q, p))
            kl = zeros.index_add(0, each.of, _terms(p, q)) + _terms(rest_p, rest_q)
            result = result.index_add(0, each.chunk, kl)
        both = [side.likelihood(side.size[several], several) / self.config.alm_temperature for side in sides]
        return result.index_add(0, several, bernoulli_kl(both[1], both[0]))


def _rest(named: Tensor) -> Tensor:
    return (1 - named).clamp(min=0)


def _terms(p: Tensor, q: Tensor) -> Tensor:
    """Return `p (log p - log q)` of each class, with the logarithms of `divergence`."""
    return p * (floored_log(p).clamp(min=LOWEST) - floored_log(q).clamp(min=LOWEST))


def _siblings(pieces: list[bytes], tokenizer: Any) -> dict[tuple[int, tuple[int, ...]], Spelled]:
    """Return tokens and their last pieces, by the number of pieces and all but the last one."""
    texts, ids = [], []
    for index, piece in enumerate(pieces):
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            continue  # a part of a character cannot be spelled alone
        if text:
            texts.append(text)
            ids.append(index)
    found: dict[tuple[int, tuple[int, ...]], dict[int, int]] = defaultdict(dict)
    for index, spelling in zip(ids, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True):
        if len(spelling) > 1:
            found[len(spelling), tuple(spelling[:-1])].setdefault(spelling[-1], index)
    return {path: (torch.tensor(list(tokens.values())), torch.tensor(list(tokens))) for path, tokens in found.items()}
