"""On-policy distillation of SmolLM2 from Gemma 3, on French verbs: `python -m experiments.on_policy.real`.

Needs the models of `python -m experiments.real models`, whose directory is `--state`. With the first seed every method
is run at every learning rate, with the other seeds at the one that was best on validation. A call leaves out what is
done; runs that are stopped after `--seconds` resume in the next one. Writes `results/real-SIZE.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.digits.stages import machine
from experiments.jobs import SHORTEST_S, finished, run_all
from experiments.on_policy.real.methods import ASKED_FOR, METHODS, SIZES, Cell, Size, job, models_of, run_name
from experiments.on_policy.real.task import Files, write_files
from xtoken_core.atomic import atomic_write

RESULTS = Path(__file__).parents[1] / "results"
ACCURACY = "task_accuracy_"
WAITS = ("completion_tokens", "finished", "staleness", "entropy", "data_wait", "teacher_wait", "rollout_wait")


def main() -> int:
    """Train and measure; the exit status is 3 if not all is done."""
    arguments = _arguments()
    until = time.monotonic() + arguments.seconds
    state, student_and_teacher = arguments.state, models_of(arguments.state)
    for model in student_and_teacher:
        if not model.is_dir():
            print(f"error: there is no {model}: run `python -m experiments.real models` first", file=sys.stderr)
            return 2
    size = SIZES[arguments.size]
    files = Files(state / size.directory)
    if not files.text.is_file():
        write_files(files.directory, train=size.train, validation=size.validation, test=size.test)
    teacher = _teacher(student_and_teacher[1], files, arguments.device)

    rollout = {"weights": arguments.weights} if arguments.weights else {}
    rollout |= {"cuda_graphs": True} if arguments.cuda_graphs else {}

    def train(cells: Sequence[Cell], others: Sequence[Cell] = ()) -> list[Cell]:
        """Make the runs of cells; return these and the others that are done, which the result is of after every run."""
        done: list[Cell] = []

        def write() -> None:
            done[:] = [cell for cell in (*others, *cells) if finished(state, run_name(cell, size))]
            result = {
                "machine": machine(),
                "size": vars(size),
                "rollout": rollout,
                "teacher": teacher,
                "runs": [{**vars(cell), **_measured(state / "runs" / run_name(cell, size))} for cell in done],
            }
            arguments.out.mkdir(parents=True, exist_ok=True)
            if done:
                atomic_write(arguments.out / f"real-{size.name}.json", json.dumps(result, indent=1) + "\n")

        run_all(
            state, [job(cell, size, device=arguments.device, rollout=rollout) for cell in cells],
            side_by_side=arguments.side_by_side, until=until, least_s=arguments.least, on_end=write,
        )  # fmt: skip
        write()
        return done

    first = cells_of_first_seed(size)
    train(first)
    best = _best_rates(state, first, size)
    others = [Cell(name, rate, seed) for seed in size.seeds[1:] for name, rate in best.items()]
    done = train(others, first)
    return 0 if len(done) == len(first) + len(others) else 3


def cells_of_first_seed(size: Size) -> list[Cell]:
    """Return every method at every learning rate, in the order in which they are run.

    Args:
        size: The experiment's size.
    """
    cells = [Cell(method, rate, size.seeds[0]) for rate in size.rates for method in METHODS]
    return sorted(cells, key=lambda cell: cell.method not in ASKED_FOR)


def _teacher(teacher: Path, files: Files, device: str) -> dict[str, float]:
    import torch

    from experiments.on_policy.real.answers import write_answers

    return write_answers(teacher, files, device="cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def _best_rates(state: Path, cells: Sequence[Cell], size: Size) -> dict[str, float]:
    """Return each method's learning rate with the best accuracy on validation, of methods that are finished."""
    best: dict[str, tuple[float, float]] = {}
    for cell in cells:
        if finished(state, run_name(cell, size)):
            accuracy = _measured(state / "runs" / run_name(cell, size))["curve"][-1]["validation"]
            best[cell.method] = max(best.get(cell.method, (-1.0, 0.0)), (accuracy, cell.rate))
    return {method: rate for method, (_, rate) in best.items()}


def _measured(run: Path) -> dict[str, Any]:
    """Return a run's accuracy after each evaluation, and its own records."""
    steps, evals = (
        [json.loads(line) for line in (run / name).read_text(encoding="utf-8").splitlines()]
        for name in ("steps.jsonl", "eval.jsonl")
    )
    means = {}
    for column in WAITS:
        values = [row[column] for row in steps if column in row]
        means[column] = sum(values) / len(values) if values else None
    return {
        "curve": [
            {"step": row["step"], **{name: row[ACCURACY + name] for name in ("validation", "test")}} for row in evals
        ],
        "tokens": sum(row["tokens"] for row in steps),
        "seconds": sum(row["seconds"] for row in steps),
        "kl": steps[-1].get("kl_loss"),
        "means": means,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path("runs/real"), help="models, texts and runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--weights", help="of runs with completions, as rollout.weights")
    parser.add_argument("--cuda-graphs", action="store_true", help="of runs with completions, as rollout.cuda_graphs")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--side-by-side", type=int, default=4, help="runs at a time")
    parser.add_argument("--least", type=float, default=SHORTEST_S, help="seconds before their end, none begins in")
    parser.add_argument("--seconds", type=float, default=500.0, help="when runs are stopped, to resume later")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
