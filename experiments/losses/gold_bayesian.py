"""GOLD with `uld_token_merge_strategy = "bayesian"` (huggingface/trl#5905): a chunk's merged distribution."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from experiments.losses.base import ReferenceLoss, Side, divergence


class GoldBayesianLoss(ReferenceLoss):
    """KL over shared tokens plus the L1 distance of the sorted rest, of merged distributions.

    A chunk's merged distribution is that at its last position times the probabilities of its own earlier tokens. It is
    not renormalised. The shorter list of other tokens is padded with zeros.
    """

    elements: ClassVar[int] = 1 << 25  # sorting takes several times the memory of what is sorted

    def __init__(self, *arguments, **keywords) -> None:  # type: ignore[no-untyped-def]
        """Split both vocabularies into shared tokens and others; arguments as for `Loss`."""
        super().__init__(*arguments, **keywords)
        sizes = len(self.student_bytes), len(self.teacher_bytes)
        self.others = [
            torch.tensor(sorted(set(range(size)) - set(ids.tolist())), dtype=torch.int64, device=self.device)
            for size, ids in zip(sizes, self.shared, strict=True)
        ]

    def values(self, student: Side, teacher: Side, prepared: Any) -> Tensor:
        """Return the sum of both parts."""
        merged = [self._merged(side) for side in (student, teacher)]
        own, other = (log_p[:, ids] for log_p, ids in zip(merged, self.shared, strict=True))
        rest = [
            torch.sort(log_p[:, ids].exp(), dim=1, descending=True).values
            for log_p, ids in zip(merged, self.others, strict=True)
        ]
        width = max(part.shape[1] for part in rest)
        padded = [torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in rest]
        return divergence(other.exp(), other, own) + (padded[0] - padded[1]).abs().sum(1)

    def _merged(self, side: Side) -> Tensor:
        """Return `[C, V]` logarithms of the merged distributions."""
        chunks = torch.arange(len(side.first), device=side.log_p.device)
        before = side.likelihood(side.size - 1, chunks)
        return side.log_p[side.first + side.size - 1] + before.unsqueeze(1)
