"""The optimiser of a run, with its schedule of learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, AdamW, Optimizer

from xtoken_core.config.train import TrainSpec
from xtoken_services.trainer.student import Student

STEP = "step"
"""Name of the count of updates in torch's state of a weight."""


class StudentOptimizer:
    """AdamW or Adafactor over the trainable weights of a student.

    All state exists from the start, so that a checkpoint can be loaded into it in place.

    Attributes:
        weights: The trainable weights, by name.
        averages: Per teacher whose weights move the average of the trainable weights, in float32, by name.

    Args:
        student: Its trainable weights are updated.
        spec: The run's settings.
        steps: Optimiser steps of the run.
        restart: As for `learning_rate`.
        decays: Per teacher whose weights move the part of their average that a step keeps.
    """

    def __init__(
        self,
        student: Student,
        spec: TrainSpec,
        steps: int,
        *,
        restart: tuple[int, float] | None = None,
        decays: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        self.student, self.spec, self.steps, self.restart, self.decays = student, spec, steps, restart, decays
        self.weights = student.trainable
        self.averages = {
            teacher: {name: weight.detach().to(torch.float32, copy=True) for name, weight in self.weights.items()}
            for teacher in decays
        }
        fused = student.device.type == "cuda"
        groups = decay_groups(self.weights.values(), spec)
        self._optimizer: Optimizer
        if spec.optimizer == "adamw":
            self._optimizer = AdamW(groups, lr=spec.learning_rate, betas=spec.betas, fused=fused)
        else:
            self._optimizer = Adafactor(groups, lr=spec.learning_rate)
        for weight in self.weights.values():
            # Made before the first step, so that a checkpoint can be loaded into it and memory shows its peak at the
            # start.
            state = _initial_state(self._optimizer, weight, student.device if fused else torch.device("cpu"))
            self._optimizer.state[weight] = state

    def clip(self) -> Tensor:
        """Clip the gradients to the norm `grad_clip`; returns the norm before, a scalar on the device."""
        # An infinite limit changes nothing, and the norm is reported in any case.
        limit = self.spec.grad_clip if self.spec.grad_clip is not None else math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, update: int) -> float:
        """Take an optimiser step and clear the gradients.

        Args:
            update: Number of the step, from 0.

        Returns:
            The learning rate.
        """
        rate = learning_rate(self.spec, self.steps, update, self.restart)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        for teacher, decay in self.decays.items():
            for name, average in self.averages[teacher].items():
                average.lerp_(self.weights[name].detach().float(), 1 - decay)
        self.zero_grad()
        self.student.sync_weights()
        return rate

    @contextmanager
    def averaged(self, teacher: int) -> Iterator[None]:
        """Give the student the averages of its weights for a while."""
        own = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self._replace(self.averages[teacher])
        try:
            yield
        finally:
            self._replace(own)

    def _replace(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(values[name])
        self.student.sync_weights()

    def zero_grad(self) -> None:
        """Clear gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return weights and moments by name, not copied; those of a sharded student are `DTensor`s."""
        state: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            state[f"model.{name}"] = weight.detach()
            moments = self._optimizer.state[weight].items()
            state |= {f"optimizer.{name}.{moment}": value for moment, value in moments if moment != STEP}
        for teacher, average in self.averages.items():
            state |= {f"average.{teacher}.{name}": value for name, value in average.items()}
        state["optimizer.steps"] = torch.stack([*self._counts()])
        return state

    def after_restore(self, state: Mapping[str, Tensor]) -> None:
        """Apply a checkpoint that was loaded into the tensors of `state`."""
        for own, count in zip(self._counts(), state["optimizer.steps"], strict=True):
            own.copy_(count)
        self.student.sync_weights()

    def _counts(self) -> Iterator[Tensor]:
        """Yield the count of updates of every weight."""
        return (self._optimizer.state[weight][STEP] for weight in self.weights.values())


def _initial_state(optimizer: Optimizer, weight: nn.Parameter, device: torch.device) -> dict[str, Tensor]:
    """Return the state that an optimiser would give a weight at its first step."""
    if isinstance(optimizer, AdamW):
        moments = {name: _zeros(weight) for name in ("exp_avg", "exp_avg_sq")}
    elif weight.ndim > 1:  # the second moment's mean over the columns and over the rows
        moments = {"row_var": _zeros(weight[..., :1]), "col_var": _zeros(weight[..., :1, :])}
    else:
        moments = {"variance": _zeros(weight)}
    return {STEP: torch.zeros((), device=device), **moments}


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like.detach(), memory_format=torch.preserve_format)


def decay_groups(weights: Iterable[nn.Parameter], spec: TrainSpec) -> list[dict[str, object]]:
    """Return an optimiser's parameter groups: no weight decay on vectors (biases, norms)."""
    params = list(weights)
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


DECAY_FRACTION = 0.2
"""Fraction of a run's steps in which the rate of the schedule `wsd` falls."""


def learning_rate(spec: TrainSpec, steps: int, update: int, restart: tuple[int, float] | None = None) -> float:
    """Return the learning rate: linear warm-up, then the schedule from `learning_rate` down to `min_learning_rate`.

    A function of the step alone, so that a resumed run needs no scheduler state. `wsd` (warm-up, stable, decay; Hu et
    al. 2024, arXiv 2404.06395) stays at the highest rate until the last fifth of the run.

    Args:
        spec: The run's settings.
        steps: Optimiser steps of the run.
        update: Number of the step, from 0.
        restart: The step at which the schedule ends and starts again, and the highest rate from there on.
    """
    if restart is not None and update >= restart[0]:
        began, highest = restart
        return highest / spec.learning_rate * learning_rate(spec, steps - began, update - began)
    steps = steps if restart is None else restart[0]
    floor = min(spec.min_learning_rate / spec.learning_rate, 1.0)
    if update < spec.warmup_steps:
        return spec.learning_rate * ((update + 1) / spec.warmup_steps)
    began = spec.warmup_steps
    if spec.schedule == "wsd":
        began = max(began, steps - math.ceil(steps * DECAY_FRACTION))
    progress = min(max(update - began, 0) / max(steps - began, 1), 1.0)
    if spec.schedule == "constant":
        progress = 0.0
    kept = 0.5 * (1 + math.cos(math.pi * progress)) if spec.schedule == "cosine" else 1 - progress
    return spec.learning_rate * (floor + (1 - floor) * kept)
