"""Measure the bias of the losses on known sources: `python -m experiments.consistency --scale full`.

A result is written as soon as it is known, and what has a result is left out, so that the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
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
from experiments.consistency.parallel import Task, measure_all
from experiments.consistency.source import JOINED_LINES, SPLIT_NUMERALS, WHOLE_NUMERALS, make_source, train_tokenizer
from xtoken_core.atomic import atomic_write
from xtoken_core.chain import ChainTables, build_tables
from xtoken_core.ops.chain.reference import ChainOptions

RESULTS = Path(__file__).with_name("results")
SCALES = {"full": (1750, 330, 800, 1300, 200), "reduced": (200, 60, 260, 360, 120), "tiny": (40, 30, 130, 170, 80)}
"""Words, numerals, tokens of the student, tokens of the teacher, steps of descent."""
VARIANTS = {
    "chain, all corrections": ChainOptions(conditioning=True, end_terms=True, bare_space=False),
    "chain": ChainOptions(conditioning=False, end_terms=False, bare_space=True),
    "chain + end terms": ChainOptions(conditioning=False, end_terms=True, bare_space=True),
    "chain + conditioning": ChainOptions(conditioning=True, end_terms=False, bare_space=True),
    "chain + end terms + conditioning": ChainOptions(conditioning=True, end_terms=True, bare_space=True),
}
COMPARED = ("chain + end terms + conditioning", "chain")
"""The default and the uncorrected form: where their descents end is measured first."""
CE = "cross-entropy"
ALM = {"ALM, tau 1": 1, "ALM, tau 100": 100}


def losses_of(
    world: World, tables: ChainTables, tokenizers: tuple[Any, Any], *, by_class: bool = True
) -> dict[str, Callable[[], Loss]]:
    """Return a function that prepares each loss, by name.

    Args:
        world: The source.
        tables: The tables of its tokenizers.
        tokenizers: The student's and the teacher's.
        by_class: Keep classes of chunks apart; else a loss may give all chunks as one class, which is cheaper.
    """
    found: dict[str, Callable[[], Loss]] = {}
    for name, options in VARIANTS.items():
        found[name] = lambda options=options: expected.chain(world, tables, options, by_class=by_class)
    for name, tau in ALM.items():
        found[name] = lambda tau=tau: expected.likelihood_matching(world, tau)
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


def stages_of(name: str) -> list[str]:
    """Return the names of the measurements of a loss; cross-entropy is added where the loss's expectation is exact."""
    return ["near", "truth"] if name == CE or name in CLASSES else ["near", "near, cross-entropy .1", "truth"]


def by_need(tasks: Iterable[Task]) -> list[Task]:
    """Return measurements in the order in which they begin: first where the descents of `COMPARED` end.

    Args:
        tasks: Losses and stages.
    """
    return sorted(tasks, key=lambda task: task[0] not in COMPARED or task[1] == "truth")


def measure_stage(world: World, loss: Loss, stage: str, steps: int, seed: int) -> dict[str, Any]:
    """Measure one stage of a loss.

    Args:
        world: The source.
        loss: Its expectation.
        stage: Of `stages_of`.
        steps: Of descent.
        seed: Of the starts of descent.
    """
    generator = torch.Generator().manual_seed(seed)
    truth = world.sides[0].truth
    noise, far = (torch.randn(truth.shape, dtype=torch.float64, generator=generator) for _ in range(2))
    if stage == "truth":
        return at_the_truth(world, loss, 0.5 * noise)
    near = logits_of(0.9 * truth + 0.1 / truth.shape[1]) + far
    losses = [(1.0, loss.sampled(seed) if isinstance(loss, ByClass) else loss)]
    if stage != "near":
        losses.append((0.1, expected.cross_entropy(world)))
    return descend(world, losses, near, steps)


class Results:
    """The result files of a scale, one per world, and the files of single measurements that are not in them yet.

    Args:
        directory: Where they are.
        scale: Of `SCALES`.
    """

    def __init__(self, directory: Path, scale: str) -> None:
        self._directory, self._scale = directory, scale

    def read(self, number: int) -> dict[str, Any]:
        """Return the results of a world."""
        path = self._path(number)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"losses": {}}

    def add(self, number: int, part: dict[str, Any]) -> None:
        """Write one measurement, or a world's description, to a file of its own.

        Args:
            number: Of the world.
            part: What its result file has, with one loss and one stage at most.
        """
        directory = self._parts(number)
        directory.mkdir(parents=True, exist_ok=True)
        atomic_write(directory / f"{time.time_ns()}-{os.getpid()}.json", json.dumps(part) + "\n")

    def collect(self, number: int) -> None:
        """Move the single measurements of a world into its file."""
        parts = sorted(self._parts(number).glob("*.json"))
        found = self.read(number)
        for path in parts:
            part = json.loads(path.read_text(encoding="utf-8"))
            for name, entry in part.pop("losses", {}).items():
                known = found["losses"].setdefault(name, {"cpu_seconds": 0.0})
                seconds = round(known["cpu_seconds"] + entry["cpu_seconds"], 1)
                known |= entry | {"cpu_seconds": seconds}
            found |= part
        if parts:
            atomic_write(self._path(number), json.dumps(found, indent=1) + "\n")
            shutil.rmtree(self._parts(number))

    def _path(self, number: int) -> Path:
        return self._directory / f"{self._scale}-world{number}.json"

    def _parts(self, number: int) -> Path:
        return self._directory / f"{self._scale}-world{number}.parts"


def run(
    worlds: Iterable[int],
    scale: str,
    seed: int,
    names: Iterable[str] | None,
    results: Path,
    *,
    jobs: int = 1,
    seconds: float | None = None,
) -> bool:
    """Measure everything that has no result yet.

    Args:
        worlds: Their numbers.
        scale: Of `SCALES`.
        seed: Of the source and of the starts of descent.
        names: Some of the losses; None: all.
        results: Directory of the result files.
        jobs: Processes.
        seconds: Time after which it stops; None: none.

    Returns:
        Whether everything has a result now.
    """
    steps, files = SCALES[scale][-1], Results(results, scale)
    chosen = [name for name in (*VARIANTS, *ALM, CE, *CLASSES) if names is None or name in names]

    def missing(number: int) -> list[Task]:
        known = files.read(number)["losses"]
        return by_need(
            (name, stage) for name in chosen for stage in stages_of(name) if stage not in known.get(name, {})
        )

    def prepare(number: int) -> Callable[[str, str], None]:
        world, tables, tokenizers = make(number, scale, seed)
        files.add(number, {"world": number, "scale": scale, "seed": seed, "steps": steps, **describe(world, tables)})

        def measure(name: str, stage: str) -> None:
            began = time.process_time()
            loss = losses_of(world, tables, tokenizers, by_class=stage == "truth")[name]()
            entry: dict[str, Any] = {"environment": environment()}
            if isinstance(loss, ByClass):
                entry["covered"] = loss.covered
            entry[stage] = measure_stage(world, loss, stage, steps, seed)
            entry["cpu_seconds"] = time.process_time() - began
            files.add(number, {"losses": {name: entry}})
            print(scale, number, name, stage, json.dumps(entry[stage].get("all", entry[stage])), flush=True)

        return measure

    numbers = list(worlds)
    for number in numbers:
        files.collect(number)
    measure_all({number: missing(number) for number in numbers}, prepare, jobs=jobs, seconds=seconds)
    for number in numbers:
        files.collect(number)
    return not any(map(missing, numbers))


def main() -> None:
    """Run what is left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="*", choices=(1, 2, 3), default=(1, 2, 3))
    parser.add_argument("--scale", choices=SCALES, default="reduced")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", nargs="*", help="some of the losses, by name")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--seconds", type=float, help="stop after this time; what has been measured is kept")
    options = parser.parse_args()
    whole = run(
        options.worlds,
        options.scale,
        options.seed,
        options.losses,
        options.results,
        jobs=options.jobs,
        seconds=options.seconds,
    )
    print("complete" if whole else "not complete: run the same command again", flush=True)


if __name__ == "__main__":
    main()
