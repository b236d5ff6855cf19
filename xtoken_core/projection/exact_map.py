"""The exact-token map: pairs of tokens common to two vocabularies, from the dense top-k projection."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

RELAXED_WEIGHT = 0.6
"""Smallest first weight for which the relaxed map pairs a row with its best teacher token."""


def exact_token_map(
    indices: Int[Tensor, "V_s k"], likelihoods: Float[Tensor, "V_s k"], *, relaxed: bool, teacher_vocab_size: int
) -> dict[str, Int[Tensor, " n"]]:
    """Split both vocabularies into paired common tokens and the rest.

    Each row is sorted by weight, descending and stable. Strict: a row has a counterpart if its first weight is
    exactly 1.0 and slot 1 of the unsorted row is empty (-1); of several rows with the same counterpart the lowest
    student id wins. Relaxed: if its first weight is at least 0.6; the highest weight wins, then the lowest id.

    Args:
        indices: Teacher ids of each student row, -1 = empty slot.
        likelihoods: Their weights.
        relaxed: True for the relaxed rule, False for the strict one.
        teacher_vocab_size: `V_t`; counterparts outside `[0, V_t)` are dropped.

    Returns:
        int64 ids: `common_student` and `common_teacher`, paired and ascending by student id, `uncommon_student` and
        `uncommon_teacher`, each ascending.
    """
    V_s, k = indices.shape
    weights, order = likelihoods.sort(dim=1, descending=True, stable=True)
    weight, teacher = weights[:, 0], indices.gather(1, order)[:, 0].long()
    if relaxed:
        has = weight >= RELAXED_WEIGHT
    else:
        has = weight == 1.0
        if k > 1:
            has &= indices[:, 1] == -1
    has &= (teacher >= 0) & (teacher < teacher_vocab_size)
    student = torch.nonzero(has).squeeze(1)
    student = student[_winners(teacher[student], weight[student] if relaxed else None, teacher_vocab_size)]
    common_teacher = teacher[student]
    return {
        "common_student": student,
        "common_teacher": common_teacher,
        "uncommon_student": _others(student, V_s),
        "uncommon_teacher": _others(common_teacher, teacher_vocab_size),
    }


def _winners(teacher: Tensor, weight: Tensor | None, teacher_vocab_size: int) -> Tensor:
    """Return True at the one candidate (in ascending student order) that keeps its teacher id."""
    candidates = torch.ones_like(teacher, dtype=torch.bool)
    if weight is not None:
        best = weight.new_full((teacher_vocab_size,), -torch.inf)
        candidates = weight == best.scatter_reduce(0, teacher, weight, "amax")[teacher]
    # Candidates are in ascending student order, so the lowest rank per teacher id is the lowest student id.
    rank = torch.arange(len(teacher), device=teacher.device).masked_fill(~candidates, len(teacher))
    first = rank.new_full((teacher_vocab_size,), len(teacher))
    return rank == first.scatter_reduce(0, teacher, rank, "amin")[teacher] if len(teacher) else candidates


def _others(ids: Tensor, size: int) -> Tensor:
    rest = torch.ones(size, dtype=torch.bool, device=ids.device)
    rest[ids] = False
    return torch.nonzero(rest).squeeze(1)
