"""Measure the bias of the losses: `python -m experiments.consistency --world 1 --out results.json`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.consistency import expected
from experiments.consistency.exact import Key, World, make_world
from experiments.consistency.expected import Loss, kl_per_token, logits_of
from experiments.consistency.source import JOINED_LINES, SPLIT_NUMERALS, WHOLE_NUMERALS, make_source, train_tokenizer
from xtoken_core.chain import ChainTables, build_tables
from xtoken_core.losses.chain import ChainOptions

SCALES = {"full": (400, 330, 800, 1300, 200), "reduced": (120, 60, 260, 360, 120), "tiny": (40, 30, 130, 170, 80)}
"""Words, numerals, tokens of the student, tokens of the teacher, steps of descent."""
VARIANTS = {
    "chain": ChainOptions(conditioning=False, end_terms=False, bare_space=True),
    "chain + end terms": ChainOptions(conditioning=False, end_terms=True, bare_space=True),
    "chain + end terms + conditioning": ChainOptions(conditioning=True, end_terms=True, bare_space=True),
    "chain, all corrections": ChainOptions(),
}


def losses_of(world: World, tables: ChainTables) -> dict[str, Loss]:
    """Return every loss by name."""
    found = {"cross-entropy": expected.cross_entropy(world)}
    found |= {name: expected.chain(world, tables, options) for name, options in VARIANTS.items()}
    found |= {f"ALM {tau}": expected.likelihood_matching(world, tau) for tau in (1.0, 100.0)}
    return found


def total(values: Mapping[Any, Tensor], rate: float) -> Tensor:
    """Return the loss per chunk."""
    return torch.stack(list(values.values())).sum() / rate


def at_the_truth(world: World, loss: Loss, noise: Tensor) -> dict[str, Any]:
    """Return value and relative gradient where the student is the source, by class of chunk.

    The gradient's norm is divided by that at a disturbed student; 1 is bias only.
    """
    truth = logits_of(world.sides[0].truth)
    found: dict[str, Any] = {}
    norms: list[dict[str, float]] = []
    for logits in (truth, truth + noise):
        own = logits.clone().requires_grad_()
        parts = loss(own)
        groups = {label(key): [value] for key, value in parts.items()}
        groups["all"] = list(parts.values())
        groups["numerals"] = [value for key, value in parts.items() if key[1]]
        norms.append({})
        for name, values in groups.items():
            if values:
                value = torch.stack(values).sum()
                (gradient,) = torch.autograd.grad(value, own, retain_graph=True)
                norms[-1][name] = float(gradient.norm())
                found.setdefault(name, {"value": value.item()})
    for name, entry in found.items():
        entry["relative_gradient"] = norms[0][name] / max(norms[1][name], 1e-300)
    return found


def label(key: Key) -> str:
    """Return the name of a class of chunks."""
    return f"{key[0]} numerals" if key[1] else key[0]


def descend(world: World, losses: list[tuple[float, Loss]], start: Tensor, steps: int, rate: float) -> dict[str, float]:
    """Descend with Adam and a cosine schedule; report the KL per token at best and at the end."""
    logits = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.15)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    best = kl_per_token(world, start)
    for _ in range(steps):
        optimizer.zero_grad()
        sum((weight * total(loss(logits), rate) for weight, loss in losses), torch.zeros(())).backward()
        optimizer.step()
        schedule.step()
        best = min(best, kl_per_token(world, logits.detach()))
    return {"start": kl_per_token(world, start), "best": best, "final": kl_per_token(world, logits.detach())}


def main() -> None:
    """Run one world."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, choices=(1, 2, 3), default=1)
    parser.add_argument("--scale", choices=SCALES, default="reduced")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="of descent; the scale's own unless given")
    parser.add_argument("--losses", nargs="*", help="some of the losses, by name")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    words, numerals, student_size, teacher_size, steps = SCALES[arguments.scale]
    steps = arguments.steps or steps
    source = make_source(words, numerals, arguments.seed, joined_lines=arguments.world == 2)
    student = train_tokenizer(source, student_size, WHOLE_NUMERALS, seed=1)
    pattern = JOINED_LINES if arguments.world == 2 else SPLIT_NUMERALS
    teacher = train_tokenizer(source, teacher_size, pattern, seed=2, model="unigram" if arguments.world == 3 else "bpe")
    world = make_world(source, student, teacher)
    tables = ChainTables.of(build_tables(student, teacher))
    rate = sum(world.chunks.values())
    shapes: dict[str, float] = {}
    for (key, _, _), weight in world.chunks.items():
        shapes[key[0]] = shapes.get(key[0], 0.0) + weight / rate
    result: dict[str, Any] = {"arguments": {k: str(v) for k, v in vars(arguments).items()}, "chunks": shapes}
    result["counts"] = {"chunks": len(world.chunks), "starts": len(world.starts), "states": len(world.sides[0].truth)}
    result["tokens"] = {"student": len(student), "teacher": len(teacher), "common": tables.common}
    print(json.dumps(result), flush=True)
    losses = losses_of(world, tables)
    truth = world.sides[0].truth
    noise = 0.5 * torch.randn(truth.shape, dtype=torch.float64)
    near = logits_of(0.9 * truth + 0.1 / truth.shape[1]) + torch.randn(truth.shape, dtype=torch.float64)
    for name in arguments.losses or losses:
        loss = losses[name]
        begin = time.monotonic()
        entry: dict[str, Any] = {"truth": at_the_truth(world, loss, noise)}
        entry["near"] = descend(world, [(1.0, loss)], near, steps, rate)
        if name != "cross-entropy":
            entry["near, cross-entropy .1"] = descend(
                world, [(1.0, loss), (0.1, losses["cross-entropy"])], near, steps, rate
            )
        entry["seconds"] = round(time.monotonic() - begin, 1)
        result[name] = entry
        print(name, json.dumps(entry), flush=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
