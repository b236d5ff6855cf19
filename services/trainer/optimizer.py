"""AdamW with a linear warm-up and a cosine decay."""

from __future__ import annotations

import math

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from xtoken_core.config.spec import TrainSpec


def make_optimizer(model: torch.nn.Module, spec: TrainSpec) -> AdamW:
    """AdamW; weight decay leaves out vectors (biases, norms), as is usual."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": spec.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=spec.learning_rate, betas=spec.betas)


def make_schedule(optimizer: AdamW, spec: TrainSpec, steps: int) -> LambdaLR:
    """Linear warm-up over `warmup_steps`, then a cosine from `learning_rate` down to `min_learning_rate`.

    Args:
        optimizer: Whose rate is set.
        spec: The run's settings.
        steps: Optimiser steps of the run.
    """
    floor = min(spec.min_learning_rate / spec.learning_rate, 1.0)

    def factor(step: int) -> float:
        if step < spec.warmup_steps:
            return (step + 1) / spec.warmup_steps
        progress = (step - spec.warmup_steps) / max(steps - spec.warmup_steps, 1)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))

    return LambdaLR(optimizer, factor)
