"""Two measurements of a loss on a known source: its value and gradient at the truth, and where descent ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.consistency.exact import World
from experiments.consistency.expected import Loss, kl_per_token, logits_of

SHAPES = ("1:1", "1:n", "n:1", "m:n")
CLASSES = {"numerals": "numeral", "line ends": "line"}
"""Classes of chunks by the kind of their unit, beside those by shape."""


def at_the_truth(world: World, loss: Loss, noise: Tensor) -> dict[str, Any]:
    """Return value and relative gradient where the student is the source, by class of chunk.

    The gradient's norm is divided by that at a disturbed student: 0 is consistent, 1 is bias only. Values are nats per
    chunk of the class.

    Args:
        world: The source.
        loss: The expected loss.
        noise: What the disturbed student's logits add to the truth.
    """
    truth = logits_of(world.sides[0].truth)
    found: dict[str, Any] = {}
    norms: list[dict[str, float]] = []
    for logits in (truth, truth + noise):
        own = logits.clone().requires_grad_()
        norms.append({})
        for name, values in _classes(loss(own)).items():
            value = torch.stack(values).sum()
            (gradient,) = torch.autograd.grad(value, own, retain_graph=True)
            norms[-1][name] = float(gradient.norm())
            found.setdefault(name, {"value": value.item() / rate_of(world, name)})
    for name, entry in found.items():
        entry["relative_gradient"] = norms[0][name] / max(norms[1][name], 1e-300)
    return found


def _classes(values: Mapping[Any, Tensor]) -> dict[str, list[Tensor]]:
    found = {"all": list(values.values())}
    for key, value in values.items():
        names = [key[0]] if key[0] in SHAPES else []
        for name in names + [name for name, kind in CLASSES.items() if key[1] == kind]:
            found.setdefault(name, []).append(value)
    return found


def rate_of(world: World, name: str) -> float:
    """Return how many chunks of a class are met per unit of text."""
    rates = world.rates.items()
    return sum(rate for key, rate in rates if name in ("all", key[0]) or CLASSES.get(name) == key[1])


def descend(
    world: World, losses: Sequence[tuple[float, Loss]], start: Tensor, steps: int
) -> dict[str, float]:  # fmt: skip
    """Descend with Adam and a cosine schedule; return the KL per token at the start, at best and at the end.

    Args:
        world: The source.
        losses: Weights and losses.
        start: Logits.
        steps: Steps of Adam at .15.
    """
    rate = rate_of(world, "all")
    logits = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.15)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    first = best = kl_per_token(world, start)
    for _ in range(steps):
        optimizer.zero_grad()
        terms = [weight * torch.stack(list(loss(logits).values())).sum() / rate for weight, loss in losses]
        torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        best = min(best, kl_per_token(world, logits.detach()))
    return {"start": first, "best": best, "final": kl_per_token(world, logits.detach())}
