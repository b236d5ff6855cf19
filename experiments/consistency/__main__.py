"""Measure the bias of the losses on known sources: `python -m experiments.consistency --scale full`.

A result is written as soon as it is there, and what has a result is left out, so that the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from experiments.consistency import expected
from experiments.consistency.by_class import CLASSES, ByClass
from experiments.consistency.exact import World, make_world
from experiments.consistency.expected import Loss, logits_of
from experiments.consistency.measure import at_the_truth, descend, rate_of
from experiments.consistency.source import JOINED_LINES, SPLIT_NUMERALS, WHOLE_NUMERALS, make_source, train_tokenizer
from xtoken_core.atomic import atomic_write
from xtoken_core.chain import ChainTables, build_tables
from xtoken_core.losses.chain import ChainOptions

RESULTS = Path(__file__).with_name("results")
SCALES = {"full": (1750, 330, 800, 1300, 200), "reduced": (200, 60, 260, 360, 120), "tiny": (40, 30, 130, 170, 80)}
"""Words, numerals, tokens of the student, tokens of the teacher, steps of descent."""
VARIANTS = {
    "chain, all corrections": ChainOptions(),
    "chain": ChainOptions(conditioning=False, end_terms=False, bare_space=True),
    "chain + end terms": ChainOptions(conditioning=False, end_terms=True, bare_space=True),
    "chain + end terms + conditioning": ChainOptions(conditioning=True, end_terms=True, bare_space=True),
}
CE = "cross-entropy"


def losses_of(world: World, tables: ChainTables, tokenizers: tuple[Any, Any]) -> dict[str, Callable[[], Loss]]:
    """Return a function that prepares each loss, by name.

    Args:
        world: The source.
        tables: The tables of its tokenizers.
        tokenizers: The student's and the teacher's.
    """
    found: dict[str, Callable[[], Loss]] = {}
    for name, options in VARIANTS.items():
        found[name] = lambda options=options: expected.chain(world, tables, options)
    for tau in (1, 100):
        found[f"ALM, tau {tau}"] = lambda tau=tau: expected.likelihood_matching(world, tau)
    found[CE] = lambda: expected.cross_entropy(world)
    return found | {name: lambda name=name: ByClass(world, tokenizers, name) for name in CLASSES}


def make(number: int, scale: str, seed: int) -> tuple[World, ChainTables, tuple[Any, Any]]:
    """Make a world and the tables of its tokenizers.

    Args:
        number: 1: the teacher splits digits. 2: its words join a mark and the line's end, too. 3: as 1, a Unigram.
        scale: Of `SCALES`.
        seed: Of the source.
    """
    words, numerals, student_size, teacher_size, _ = SCALES[scale]
    source = make_source(words, numerals, seed, joined_lines=number == 2)
    student = train_tokenizer(source, student_size, WHOLE_NUMERALS, seed=1)
    pattern = JOINED_LINES if number == 2 else SPLIT_NUMERALS
    teacher = train_tokenizer(source, teacher_size, pattern, seed=2, model="unigram" if number == 3 else "bpe")
    tables = ChainTables.of(build_tables(student, teacher))
    return make_world(source, student, teacher), tables, (student, teacher)


def describe(world: World, tables: ChainTables) -> dict[str, Any]:
    """Return sizes of a world."""
    total = rate_of(world, "all")
    shapes = ("1:1", "1:n", "n:1", "m:n")
    return {
        "chunks": {shape: round(rate_of(world, shape) / total, 4) for shape in shapes},
        "events": len(world.chunks),
        "states": [len(side.truth) for side in world.sides],
        "tokens": [side.truth.shape[1] for side in world.sides],
        "common": tables.common,
    }


def environment() -> dict[str, Any]:
    """Return versions and hardware."""
    cpu = next(x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x)
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def stages(world: World, name: str, loss: Loss, steps: int, seed: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the measurements of one loss, by the name of their result.

    Cross-entropy is added to the losses whose expectation is exact.
    """
    generator = torch.Generator().manual_seed(seed)
    truth = world.sides[0].truth
    noise, far = (torch.randn(truth.shape, dtype=torch.float64, generator=generator) for _ in range(2))
    near = logits_of(0.9 * truth + 0.1 / truth.shape[1]) + far
    descent = loss.sampled(seed) if isinstance(loss, ByClass) else loss
    found: dict[str, Callable[[], dict[str, Any]]] = {"near": lambda: descend(world, [(1.0, descent)], near, steps)}
    if name != CE and not isinstance(loss, ByClass):
        both = [(1.0, loss), (0.1, expected.cross_entropy(world))]
        found["near, cross-entropy .1"] = lambda: descend(world, both, near, steps)
    found["truth"] = lambda: at_the_truth(world, loss, 0.5 * noise)
    return found


def run(number: int, scale: str, seed: int, names: Iterable[str] | None, results: Path) -> None:
    """Measure everything of a world that has no result yet.

    Args:
        number: Of the world.
        scale: Of `SCALES`.
        seed: Of the source and of the starts of descent.
        names: Some of the losses; None: all.
        results: Where the result file is.
    """
    path = results / f"{scale}-world{number}.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"losses": {}}
    world, tables, tokenizers = make(number, scale, seed)
    losses = losses_of(world, tables, tokenizers)
    found |= {"world": number, "scale": scale, "seed": seed, "steps": SCALES[scale][-1], **describe(world, tables)}
    print(json.dumps({key: value for key, value in found.items() if key != "losses"}), flush=True)
    for name in [name for name in losses if names is None or name in names]:
        entry = found["losses"].setdefault(name, {"cpu_seconds": 0.0, "environment": environment()})
        if name != CE and {"truth", "near"} <= entry.keys() and (name in CLASSES or "near, cross-entropy .1" in entry):
            continue
        loss = losses[name]()
        if isinstance(loss, ByClass):
            entry["covered"] = loss.covered
        for stage, measure in stages(world, name, loss, SCALES[scale][-1], seed).items():
            if stage in entry:
                continue
            began = time.process_time()
            entry[stage] = measure()
            entry["cpu_seconds"] = round(entry["cpu_seconds"] + time.process_time() - began, 1)
            print(scale, number, name, stage, json.dumps(entry[stage].get("all", entry[stage])), flush=True)
            results.mkdir(parents=True, exist_ok=True)
            atomic_write(path, json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Run the stages that are left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="*", choices=(1, 2, 3), default=(1, 2, 3))
    parser.add_argument("--scale", choices=SCALES, default="reduced")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", nargs="*", help="some of the losses, by name")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for number in arguments.worlds:
        run(number, arguments.scale, arguments.seed, arguments.losses, arguments.results)


if __name__ == "__main__":
    main()
