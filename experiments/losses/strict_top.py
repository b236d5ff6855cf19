"""Strict 1:1 chunks with the student's top 16 (arXiv 2610.08448)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.losses.base import ReferenceLoss, Side, divergence

TOP = 16


class StrictTopLoss(ReferenceLoss):
    """Reverse KL over the student's 16 most likely shared tokens, renormalised, in chunks of one token on both sides.

    Other chunks have the value 0.
    """

    def values(self, student: Side, teacher: Side, prepared: Any) -> Tensor:
        """Return `KL(q || p)` of chunks of one token on both sides."""
        own, other = self.shared
        q, p = student.log_p[student.first][:, own], teacher.log_p[teacher.first][:, other]
        top = q.detach().topk(min(TOP, q.shape[1]), dim=1).indices
        q, p = (torch.log_softmax(x.gather(1, top), dim=1) for x in (q, p))
        value = divergence(q.exp(), q, p)
        return torch.where((student.size == 1) & (teacher.size == 1), value, 0.0)
