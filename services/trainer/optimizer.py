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
    """AdamW over what of a student is trained; every state it will ever have exists from the start.

    Args:
        student: Whose weights.
        spec: The run's settings.
        steps: Optimiser steps of the run.
    """

    def __init__(self, student: Student, spec: TrainSpec, steps: int) -> None:
        self.student, self.spec, self.steps = student, spec, steps
        self.weights = student.trained
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
        """Scale the gradients down to `grad_clip`; returns their norm before, without dimensions, on the device."""
        limit = self.spec.grad_clip if self.spec.grad_clip is not None else math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, update: int) -> float:
        """Take a step and drop the gradients.

        Args:
            update: How many were taken before.

        Returns:
            The learning rate.
        """
        rate = learning_rate(self.spec, self.steps, update)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self.drop_gradients()
        self.student.publish()
        return rate

    def drop_gradients(self) -> None:
        """Forget what was learnt since the last step."""
        self.adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Weights and moments by name, themselves and no copies; shares of a sharded student are `DTensor`s."""
        state: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            state[f"model.{name}"] = weight.detach()
            state |= {f"optimizer.{name}.{moment}": self.adamw.state[weight][moment] for moment in MOMENTS}
        state["optimizer.steps"] = torch.stack([self.adamw.state[weight]["step"] for weight in self.weights.values()])
        return state

    def restored(self, state: Mapping[str, Tensor]) -> None:
        """A checkpoint has been read into what `state` gave."""
        for weight, count in zip(self.weights.values(), state["optimizer.steps"], strict=True):
            self.adamw.state[weight]["step"].copy_(count)
        self.student.publish()


def decay_groups(weights: Iterable[nn.Parameter], spec: TrainSpec) -> list[dict[str, object]]:
    """AdamW's groups: weight decay leaves out vectors (biases, norms), as is usual."""
    every = list(weights)
    return [
        {"params": [p for p in every if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
    ]


def learning_rate(spec: TrainSpec, steps: int, update: int) -> float:
    """Linear warm-up over `warmup_steps`, then a cosine from `learning_rate` down to `min_learning_rate`.

    Args:
        spec: The run's settings.
        steps: Optimiser steps of the run.
        update: Which step it is, from 0.
    """
    floor = min(spec.min_learning_rate / spec.learning_rate, 1.0)
    if update < spec.warmup_steps:
        return spec.learning_rate * ((update + 1) / spec.warmup_steps)
    progress = (update - spec.warmup_steps) / max(steps - spec.warmup_steps, 1)
    return spec.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))
