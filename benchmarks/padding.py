"""Positions that a step computes although they are no token, from the plan alone: `python -m benchmarks.padding`.

Lengths are drawn for the student; a teacher's tokens are up to 15% more or fewer. Positions of a budget that no row
takes are not computed and do not count.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.lengths import DISTRIBUTIONS, SIGMA
from xtoken_core.atomic import atomic_write
from xtoken_core.config.spec import PAD_MULTIPLE
from xtoken_core.plan import RowLengths, plan

OUT = Path(__file__).parent / "results" / "padding.json"
SAMPLES = (16, 32, 128)
BUDGETS = (8192, 16384, 32768)
SIDES = ("student", "teacher")
RATIO = 0.15
"""Largest deviation of a teacher's number of tokens from the student's."""


def steps_of(name: str, samples: int, steps: int, seed: int) -> Iterator[list[RowLengths]]:
    """Yield the rows of each step, the same for every budget."""
    distribution, rng = DISTRIBUTIONS[name], random.Random(f"{seed}/{name}/{samples}")
    for _ in range(steps):
        student = distribution.draw(rng, samples)
        teacher = [min(distribution.context, max(1, round(n * rng.uniform(1 - RATIO, 1 + RATIO)))) for n in student]
        yield [RowLengths(i, pair) for i, pair in enumerate(zip(student, teacher, strict=True))]


def measured(name: str, samples: int, budget: int, *, packed: bool, steps: int, seed: int) -> dict[str, float]:
    """Return each side's fraction of computed positions that are no token, and micro-batches per step."""
    context = DISTRIBUTIONS[name].context
    tokens, computed, batches = [0, 0], [0, 0], 0
    for rows in steps_of(name, samples, steps, seed):
        made = plan(rows, ranks=1, token_budget=budget, max_widths=(context, context), packed=packed)
        batches += made.micro_batches
        for side in range(len(SIDES)):
            tokens[side] += sum(row.lengths[side] for row in rows)
            computed[side] += sum(batch.rows * batch.widths[side] for batch in made.ranks[0])
    fractions = {name: 1 - t / c for name, t, c in zip(SIDES, tokens, computed, strict=True)}
    return {**fractions, "micro_batches": batches / steps}


def main() -> int:
    """Measure every row of the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    settings = {"steps": arguments.steps, "seed": arguments.seed}
    rows: list[dict[str, Any]] = []
    for samples in SAMPLES:
        for budget in BUDGETS:
            row: dict[str, Any] = {"samples": samples, "budget": budget}
            for name in DISTRIBUTIONS:
                row[name] = {
                    form: measured(name, samples, budget, packed=form == "packed", **settings)
                    for form in ("padded", "packed")
                }
            rows.append(row)
    document = {
        **settings,
        "sigma": SIGMA,
        "multiple": PAD_MULTIPLE,
        "lengths": {name: {"median": d.median, "context": d.context} for name, d in DISTRIBUTIONS.items()},
        "rows": rows,
    }
    atomic_write(arguments.out, json.dumps(document, indent=1) + "\n")
    print(f"written: {arguments.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
