"""After SimCT (arXiv 2605.07711): shared tokens and the text's own aligned unit in one softmax, reverse KL."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.losses.base import ReferenceLoss, Side, divergence


class SimCTLoss(ReferenceLoss):
    """Reverse KL at the start of each chunk over shared tokens and the chunk itself.

    A shared token is scored by its log-probability. A chunk that is not one shared token is a minimal aligned unit: its
    score is the mean log-probability of its own tokens. Both sides' scores are renormalised by a softmax. On given text
    the only unit of several tokens whose score is known is the text's own. Built from the paper's abstract and a
    description in one sentence, hence "after".
    """

    def values(self, student: Side, teacher: Side, prepared: Any) -> Tensor:
        """Return `KL(q || p)` over the candidates of each chunk."""
        chunks = torch.arange(len(student.first), device=student.log_p.device)
        own, other = self.shared
        ids = student.targets[student.first], teacher.targets[teacher.first]
        pairs = (own.unsqueeze(0) == ids[0].unsqueeze(1)) & (other.unsqueeze(0) == ids[1].unsqueeze(1))
        is_unit = (student.size > 1) | (teacher.size > 1) | ~pairs.any(1)
        scores = []
        for side, shared in ((student, own), (teacher, other)):
            unit = side.likelihood(side.size, chunks) / side.size
            unit = torch.where(is_unit, unit, -torch.inf).unsqueeze(1)
            scores.append(torch.log_softmax(torch.cat([side.log_p[side.first][:, shared], unit], dim=1), dim=1))
        return divergence(scores[0].exp(), scores[0], scores[1])
