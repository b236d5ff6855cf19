"""AdamW with a linear warm-up and a cosine decay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from services.trainer.student import Student
from xtoken_core.config.train import TrainSpec

MOMENTS = ("exp_avg", "exp_avg_sq")


class StudentOptimizer:
    """AdamW over the trainable weights of a student.

    All state exists from the start, so that a checkpoint can be loaded into it in place.

    Args:
        student: Its trainable weights are updated.
        spec: The run's settings.
        steps: Optimiser steps of the run.
    """

    def __init__(self, student: Student, spec: TrainSpec, steps: int) -> None:
        self.student, self.spec, self.steps = student, spec, steps
        self.weights = student.trainable
        fused = student.device.type == "cuda"
        self.adamw = AdamW(
            decay_groups(self.weights.values(), spec), lr=spec.learning_rate, betas=spec.betas, fused=fused
        )
        for weight in self.weights.values():
            self.adamw.state[weight] = {
                "step": torch.zeros((), device=student.device if fused else "cpu"),
                **{name: torch.zeros_like(weight, memory_format=torch.preserve_format) for name in MOMENTS},
            }

    def clip(self) -> Tensor:
        """Clip the gradients to the norm `grad_clip`; returns the norm before, a scalar on the device."""
        limit = self.spec.grad_clip if self.spec.grad_clip is not None else math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, update: int) -> float:
        """Take an optimiser step and clear the gradients.

        Args:
            update: Number of steps taken before.

        Returns:
            The learning rate.
        """
        rate = learning_rate(self.spec, self.steps, update)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self.zero_grad()
        self.student.sync_weights()
        return rate

    def zero_grad(self) -> None:
        """Clear gradients."""
        self.adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return weights and moments by name, not copied; those of a sharded student are `DTensor`s."""
        state: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            state[f"model.{name}"] = weight.detach()
            state |= {f"optimizer.{name}.{moment}": self.adamw.state[weight][moment] for moment in MOMENTS}
        state["optimizer.steps"] = torch.stack([self.adamw.state[weight]["step"] for weight in self.weights.values()])
        return state

    def after_restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over a checkpoint that was loaded into the tensors of `state`."""
        for weight, count in zip(self.weights.values(), state["optimizer.steps"], strict=True):
            self.adamw.state[weight]["step"].copy_(count)
        self.student.sync_weights()


def decay_groups(weights: Iterable[nn.Parameter], spec: TrainSpec) -> list[dict[str, object]]:
    """Return AdamW's parameter groups: no weight decay on vectors (biases, norms)."""
    params = list(weights)
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def learning_rate(spec: TrainSpec, steps: int, update: int) -> float:
    """Return the learning rate: linear warm-up, then a cosine from `learning_rate` down to `min_learning_rate`.

    A function of the step alone, so that a resumed run needs no scheduler state.

    Args:
        spec: The run's settings.
        steps: Optimiser steps of the run.
        update: Number of the step, from 0.
    """
    floor = min(spec.min_learning_rate / spec.learning_rate, 1.0)
    if update < spec.warmup_steps:
        return spec.learning_rate * ((update + 1) / spec.warmup_steps)
    progress = (update - spec.warmup_steps) / max(steps - spec.warmup_steps, 1)
    return spec.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))
