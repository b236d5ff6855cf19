"""The experiment, stage by stage: `python -m experiments.real STAGE`.

    models    fetch the two pretrained models and convert them to Hugging Face directories
    texts     documents by language and source, in training, validation and test
    controls  the teachers' answers to word problems and instructions
    runs      train: every method, learning rate and data seed of a condition, each an `xtoken run`
    score     ask the students of instructions for the held-out ones, as their runs end
    collect   measure the teachers, add the runs to the result file, print the tables
    merge     add the rows of other result files to the result file: merge FILE...

`runs --plan` makes the runs of `experiments/real/plan.py` in their order, those first whose models are there already.
A method's first weights run at every learning rate, its other weights at the one that the result file shows to be best
with the first. A run ends after two evaluations in a row that were no better on validation (`--patience`).
Every stage leaves out what is done; rows of the result file stay when the directories of their runs are gone.
`--seconds` stops the runs gracefully; they resume when the stage is called again, on this machine or on another one
that was given the state's directory. Nothing that is fetched belongs into a repository.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import write_result
from experiments.jobs import SHORTEST_S
from experiments.real import models, plan, predictions, results, stages, summary, texts
from experiments.real.methods import CONDITIONS, METHODS, PATIENCE, SEEDS, TITLES, WEIGHTS, Cell, cells
from xtoken_core.errors import InputError

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run a stage; what cannot be had is one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path("runs/real"), help="models, texts and runs")
    commands = parser.add_subparsers(dest="stage", required=True)
    commands.add_parser("models")
    commands.add_parser("texts")
    for name in ("controls", "runs", "score", "collect"):
        _add_choice(commands.add_parser(name))
    merge = commands.add_parser("merge")
    merge.add_argument("files", nargs="+", type=Path, help="result files of other machines, the newest last")
    merge.add_argument("--out", type=Path, default=RESULTS / "real.json", help="the result file")
    arguments = parser.parse_args()
    try:
        return _run(arguments)
    except (models.MissingSourceError, results.OtherTextError, InputError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--conditions", nargs="*", choices=CONDITIONS, default=[], help="de-500k if left out; with --plan all"
    )
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--weights", nargs="*", choices=WEIGHTS, default=[], help="all if left out")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--plan", action="store_true", help="the runs of experiments/real/plan.py, in that order")
    parser.add_argument("--missing", action="store_true", help="of these the ones that the result file does not have")
    parser.add_argument(
        "--gib", type=float, default=math.inf, help="memory of a GPU that runs may take together, in GiB"
    )
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--steps", type=int, help="optimiser steps instead of the condition's, for a trial")
    parser.add_argument("--side-by-side", type=int, default=6, help="runs at a time")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that the runs are spread over")
    parser.add_argument(
        "--seconds", type=float, default=500.0, help="time after which runs are stopped, to resume later"
    )
    parser.add_argument(
        "--least", type=float, default=SHORTEST_S, help="seconds before that time in which no run is started"
    )
    parser.add_argument(
        "--patience", type=int, default=PATIENCE,
        help="evaluations in a row that are no better than a run's best one, after which it ends; 0: never",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS / "real.json", help="the result file")


def _planned(arguments: argparse.Namespace) -> list[Cell]:
    if arguments.plan:
        wanted = arguments.conditions or CONDITIONS
        result = results.read_result(arguments.out)
        known = [results.cell_of(row) for row in result["runs"]] * arguments.missing
        some = [cell for cell in plan.planned(result) if cell.condition in wanted and cell.method in arguments.methods]
        return [cell for cell in some if cell not in known]
    names = arguments.conditions or ["de-500k"]
    chosen = (names, arguments.methods, arguments.weights, arguments.seeds)
    return results.tried(cells(*map(tuple, chosen)), results.read_result(arguments.out)["runs"])


def _run(arguments: argparse.Namespace) -> int:
    if arguments.stage == "models":
        models.fetch_models(arguments.state)
    elif arguments.stage == "texts":
        for name, size in texts.make_texts(arguments.state).items():
            print(f"{name:32} {size:>12,} bytes")
    elif arguments.stage == "controls":
        stages.make_controls(arguments.state, _planned(arguments), device=arguments.device)
    elif arguments.stage == "runs":
        return 0 if _train(arguments) else 3
    elif arguments.stage == "score":
        until = time.monotonic() + arguments.seconds
        return 0 if stages.score(arguments.state, _planned(arguments), until=until, device=arguments.device) else 3
    elif arguments.stage == "collect":
        planned = _planned(arguments)
        names = list(dict.fromkeys(cell.condition for cell in planned))
        stages.teachers(arguments.state, names, arguments.device, arguments.out)
        _print_tables(stages.collect(arguments.state, planned, arguments.out), names)
    else:
        result = results.read_result(arguments.out)
        for file in arguments.files:
            result = results.merged(result, json.loads(file.read_text(encoding="utf-8")))
        write_result(arguments.out, result)
        _print_tables(result, list(result["conditions"]))
    return 0


def _train(arguments: argparse.Namespace) -> bool:
    return stages.runs(
        arguments.state,
        _planned(arguments),
        side_by_side=arguments.side_by_side,
        until=time.monotonic() + arguments.seconds,
        device=arguments.device,
        steps=arguments.steps,
        gpus=arguments.gpus,
        gib=arguments.gib,
        least_s=arguments.least,
        patience=arguments.patience,
        partly=arguments.plan,
    )


def _print_tables(result: dict[str, Any], names: list[str]) -> None:
    for name in names:
        print(f"{name}\n\n{summary.markdown(result, name, TITLES)}")
    print("\n".join(predictions.compare(result)))


if __name__ == "__main__":
    sys.exit(main())
