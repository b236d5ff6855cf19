"""The optimiser of a run, with its schedule of learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, AdamW, Optimizer

from xtoken_core.config.train import TrainSpec
from xtoken_core.errors import ConfigError
from xtoken_services.trainer.student import Student

STEP = "step"
"""Name of the count of updates in torch's state of a weight."""


class StudentOptimizer:
    """AdamW, 8-bit AdamW, Adafactor or Muon over the trainable weights of a student.

    All state exists from the start, so that a checkpoint can be loaded into it in place.

    Attributes:
        weights: The trainable weights, by name.
        parts: torch's optimisers; each weight is in one of them.
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
        self.parts = _optimizers(student, self.weights, spec)
        fused = student.device.type == "cuda"
        for part in self.parts:
            for weight in (weight for group in part.param_groups for weight in group["params"]):
                # Made before the first step, so that a checkpoint can be loaded into it and memory shows its peak at
                # the start.
                part.state[weight] = _initial_state(part, weight, student.device if fused else torch.device("cpu"))
        self._state: dict[str, dict[str, Tensor]] = {
            name: next(part.state[weight] for part in self.parts if weight in part.state)
            for name, weight in self.weights.items()
        }

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
        for part in self.parts:
            for group in part.param_groups:
                if isinstance(group["lr"], Tensor):  # a compiled step reads it
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            part.step()
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
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return weights and moments by name, not copied; those of a sharded student are `DTensor`s."""
        state: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            state[f"model.{name}"] = weight.detach()
            moments = _plain_tensors(self._state[name])
            state |= {f"optimizer.{name}.{moment}": value for moment, value in moments.items() if moment != STEP}
        for teacher, average in self.averages.items():
            state |= {f"average.{teacher}.{name}": value for name, value in average.items()}
        state["optimizer.steps"] = torch.stack([count for _, count in self._counts()])
        return state

    def after_restore(self, state: Mapping[str, Tensor]) -> None:
        """Apply a checkpoint that was loaded into the tensors of `state`."""
        for (_, own), count in zip(self._counts(), state["optimizer.steps"], strict=True):
            own.copy_(count)
        self.student.sync_weights()

    def _counts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the count of updates of every weight whose optimiser has one, by the weight's name."""
        for name, moments in self._state.items():
            if STEP in moments:
                yield name, moments[STEP]


def _optimizers(student: Student, weights: Mapping[str, nn.Parameter], spec: TrainSpec) -> list[Optimizer]:
    """Return torch's optimisers for the weights of a student.

    Muon (Jordan et al. 2024) takes the matrices between embedding and head, scaled so that AdamW's learning rates fit
    (Liu et al. 2025, arXiv 2502.16982); AdamW takes the rest.

    Raises:
        ConfigError: This torch has no Muon, or torchao is not installed.
    """
    fused = student.device.type == "cuda"
    adamw: dict[str, Any] = {"lr": spec.learning_rate, "betas": spec.betas, "fused": fused}
    if spec.optimizer == "adamw":
        return [AdamW(decay_groups(weights.values(), spec), **adamw)]
    if spec.optimizer == "adamw8bit":
        options: dict[str, Any] = {"lr": spec.learning_rate, "betas": spec.betas}
        return [_adamw_8bit()(decay_groups(weights.values(), spec), **options)]
    if spec.optimizer == "adafactor":
        return [Adafactor(decay_groups(weights.values(), spec), lr=spec.learning_rate)]
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        raise ConfigError(
            f'train.optimizer = "muon": torch {torch.__version__} has no Muon: install torch 2.9 or newer'
        )
    ends = _ends_of(student)
    hidden = {name: weight for name, weight in weights.items() if weight.ndim == 2 and name not in ends}
    rest = [weight for name, weight in weights.items() if name not in hidden]
    parts: list[Optimizer] = []
    if hidden:
        options = {"lr": spec.learning_rate, "weight_decay": spec.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        parts.append(muon(list(hidden.values()), **options))
    if rest:
        parts.append(AdamW(decay_groups(rest, spec), **adamw))
    return parts


def _ends_of(student: Student) -> set[str]:
    """Return the names of the weights of embedding and head."""
    model = student.model
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    # By identity: a tied head and embedding are one weight under one name.
    ends = {id(weight) for module in modules if module is not None for weight in module.parameters()}
    return {name for name, weight in model.named_parameters() if id(weight) in ends}


def _plain_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of a weight with 8-bit moments as their codes and scales, which can be stored."""
    plain: dict[str, Tensor] = {}
    for name, value in state.items():
        parts = {part: getattr(value, part, None) for part in ("codes", "scale")}
        quantized = {f"{name}.{part}": tensor for part, tensor in parts.items() if isinstance(tensor, Tensor)}
        plain |= quantized or {name: value}
    return plain


def _adamw_8bit() -> type[Optimizer]:
    """Return torchao's AdamW, whose moments have 8 bits and a scale per block (Dettmers et al. 2022, arXiv 2110.02861).

    Raises:
        ConfigError: torchao is not installed, or does not fit this torch.
    """
    try:
        from torchao.optim import AdamW8bit  # type: ignore[import-not-found,unused-ignore]  # an extra
    except ImportError as error:
        raise ConfigError(
            f'train.optimizer = "adamw8bit" needs torchao ({error}): install it by pip install torchao'
        ) from error
    chosen: type[Optimizer] = AdamW8bit
    return chosen


def _initial_state(part: Optimizer, weight: nn.Parameter, device: torch.device) -> dict[str, Tensor]:
    """Return the state that an optimiser would give a weight at its first step."""
    if hasattr(part, "_new_buffer"):  # torchao's
        moments = {name: part._new_buffer(weight, name == "exp_avg") for name in ("exp_avg", "exp_avg_sq")}
        return {STEP: torch.zeros(()), **moments}
    if isinstance(part, AdamW):
        moments = {name: _zeros(weight) for name in ("exp_avg", "exp_avg_sq")}
    elif not isinstance(part, Adafactor):
        # Muon keeps no count of steps.
        return {"momentum_buffer": _zeros(weight)}
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
