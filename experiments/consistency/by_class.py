"""Expected values of any loss class of the library or of `experiments/losses`, chunk by chunk through `evaluate`."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from experiments.consistency.exact import Key, World
from experiments.consistency.expected import Loss, logits_of
from experiments.losses.bpm import BPMLoss
from experiments.losses.escd import ESCDLoss
from experiments.losses.gold_bayesian import GoldBayesianLoss
from experiments.losses.simct import SimCTLoss
from experiments.losses.strict_top import StrictTopLoss
from experiments.losses.x_token_v6 import XTokenV6Loss
from xtoken_core.config.loss import LossConfig
from xtoken_core.losses.base import ChunkLoss
from xtoken_core.losses.common import EvalOptions, LossTeacher, Pairing
from xtoken_core.losses.gold import GoldLoss, HKLLoss, ULDLoss
from xtoken_core.losses.p_kl import PKLLoss
from xtoken_core.projection import build_projection

HEAVIEST = 2000
"""Distinct chunks, the most frequent ones, over which value and gradient at the truth are expected."""
SAMPLE = 512
"""Chunks drawn for each step of descent."""
CLASSES: dict[str, tuple[type[ChunkLoss], dict[str, Any]]] = {
    "P-KL, log_prob": (PKLLoss, {"vocab_topk": None}),
    "P-KL, prob": (PKLLoss, {"vocab_topk": None, "teacher_chunk_average": "prob"}),
    "gold": (GoldLoss, {"mode": "gold"}),
    "H-KL": (HKLLoss, {"mode": "h_kl"}),
    "ULD": (ULDLoss, {"mode": "uld"}),
    "GOLD, bayesian merge": (GoldBayesianLoss, {"mode": "custom"}),
    "after BPM": (BPMLoss, {"mode": "custom"}),
    "after ESCD": (ESCDLoss, {"mode": "custom"}),
    "after SimCT": (SimCTLoss, {"mode": "custom"}),
    "after X-Token v6": (XTokenV6Loss, {"mode": "custom", "alm_temperature": 1.0}),
    "after strict 1:1, top 16": (StrictTopLoss, {"mode": "custom"}),
}


class ByClass:
    """A loss class on a known source.

    Args:
        world: The source.
        tokenizers: The student's and the teacher's.
        name: Of `CLASSES`.
        heaviest: How many chunks are expected over; their rates are scaled up to those of all.

    Attributes:
        covered: The fraction of all chunks that these are.
    """

    def __init__(self, world: World, tokenizers: tuple[Any, Any], name: str, heaviest: int = HEAVIEST) -> None:
        cls, settings = CLASSES[name]
        widths = [side.truth.shape[1] for side in world.sides]
        projection = build_projection(*tokenizers)
        teacher = LossTeacher(
            widths[1], projection.indices, projection.likelihoods.double(), tokenizers=lambda: tokenizers
        )
        self.loss = cls(
            LossConfig(**settings), teacher, index=0, student_vocab_size=widths[0], device=torch.device("cpu")
        )
        self.teacher = logits_of(world.sides[1].truth)
        chosen = sorted(world.chunks.items(), key=lambda item: -item[1])[:heaviest]
        self.chunks = [chunk for chunk, _ in chosen]
        rates = torch.tensor([rate for _, rate in chosen], dtype=torch.float64)
        self.total = sum(world.chunks.values())
        self.covered = float(rates.sum()) / self.total
        self.rates = rates / self.covered

    def __call__(self, logits: Tensor) -> dict[Key, Tensor]:
        """Return the expected loss per unit of text by class of chunk."""
        return self._values(logits, torch.arange(len(self.chunks)), self.rates)

    def sampled(self, seed: int, count: int = SAMPLE) -> Loss:
        """Return an unbiased estimate from chunks that are drawn anew at every call."""
        generator = torch.Generator().manual_seed(seed)

        def loss(logits: Tensor) -> dict[Key, Tensor]:
            chosen = torch.multinomial(self.rates, count, replacement=True, generator=generator)
            return self._values(logits, chosen, torch.full((count,), self.total / count, dtype=torch.float64))

        return loss

    def _values(self, logits: Tensor, chosen: Tensor, rates: Tensor) -> dict[Key, Tensor]:
        groups: dict[tuple[Key, int, int], list[int]] = defaultdict(list)
        for n, index in enumerate(chosen.tolist()):
            key, _, tokens = self.chunks[index]
            groups[key, len(tokens[0]), len(tokens[1])].append(n)
        found: dict[Key, Tensor] = {}
        for (key, *_), members in groups.items():
            values = self._group(logits, [self.chunks[int(chosen[n])] for n in members])
            part = (rates[members] * values).sum()
            found[key] = found[key] + part if key in found else part
        return found

    def _group(self, logits: Tensor, chunks: list[Any]) -> Tensor:
        """Return the values of chunks of one shape; each is a sample of its own, with the position after it."""
        sides = []
        for k in (0, 1):
            rows = torch.tensor([rows[k] for _, rows, _ in chunks])
            targets = torch.tensor([(*tokens[k], 0) for _, _, tokens in chunks])
            ids = torch.zeros_like(targets)
            ids[:, -1] = -1
            sides.append((rows, targets, ids))
        pairing = Pairing(sides[0][1], sides[1][1], sides[0][2], sides[1][2], 1)
        both = logits[sides[0][0]], self.teacher[sides[1][0]]
        divergence = self.loss.evaluate(pairing, *both, self.loss.columns(both[1]), EvalOptions())
        return torch.stack([part[:, 0] for part in divergence.parts]).sum(0)
