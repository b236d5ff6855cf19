"""The experiment, stage by stage: `python -m experiments.real STAGE`.

    models    fetch the two pretrained models and convert them to Hugging Face directories
    texts     documents by language and source, in training, validation and test
    controls  what the controls need: the teacher's samples, chat text, a teacher with the student's tokenizer
    runs      train: every method, learning rate and data seed of a condition, each an `xtoken run`
    collect   measure the teachers, write the result file, print the tables
    split     cut a file into pieces: split FILE DIRECTORY [--bytes N]
    join      put pieces together again: join DIRECTORY FILE

Every stage leaves out what is done. `--seconds` stops the runs gracefully; they resume when the stage is called again,
on this machine or on another one that was given the state's directory. Nothing that is fetched belongs into a
repository.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from experiments.real import models, predictions, stages, summary, texts
from experiments.real.methods import CONDITIONS, METHODS, SEEDS, WEIGHTS, Cell, cells

RESULTS = Path(__file__).parent / "results"
BEST = "best"


def main() -> int:
    """Run a stage; what cannot be had is one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path("runs/real"), help="models, texts and runs")
    commands = parser.add_subparsers(dest="stage", required=True)
    commands.add_parser("models")
    commands.add_parser("texts")
    for name in ("controls", "runs", "collect"):
        _add_choice(commands.add_parser(name))
    cut = commands.add_parser("split")
    cut.add_argument("file", type=Path)
    cut.add_argument("directory", type=Path)
    cut.add_argument("--bytes", type=int, default=48 << 20)
    join = commands.add_parser("join")
    join.add_argument("directory", type=Path)
    join.add_argument("file", type=Path)
    arguments = parser.parse_args()
    try:
        return _run(arguments)
    except models.MissingSourceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--conditions", nargs="*", choices=CONDITIONS, default=["de-500k"])
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--weights", nargs="*", choices=[*WEIGHTS, BEST], default=[],
        help=f"all if left out; `{BEST}`: of each method those that were best on validation of data seed 0",
    )  # fmt: skip
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--steps", type=int, help="optimiser steps instead of the condition's, for a trial")
    parser.add_argument("--side-by-side", type=int, default=6, help="runs at a time")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that the runs are spread over")
    parser.add_argument(
        "--seconds", type=float, default=500.0, help="time after which runs are stopped, to resume later"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "real.json", help="the result file")


def _planned(arguments: argparse.Namespace) -> list[Cell]:
    best = arguments.weights == [BEST]
    chosen = (arguments.conditions, arguments.methods, [] if best else arguments.weights, arguments.seeds)
    planned = list(cells(*map(tuple, chosen)))
    return stages.best_weights(arguments.state, planned) if best else planned


def _run(arguments: argparse.Namespace) -> int:
    if arguments.stage == "models":
        models.fetch_models(arguments.state)
    elif arguments.stage == "texts":
        for name, size in texts.make_texts(arguments.state).items():
            print(f"{name:32} {size:>12,} bytes")
    elif arguments.stage == "controls":
        until = time.monotonic() + arguments.seconds
        made = stages.make_controls(arguments.state, _planned(arguments), until=until, device=arguments.device)
        return 0 if made else 3
    elif arguments.stage == "runs":
        until = time.monotonic() + arguments.seconds
        done = stages.runs(
            arguments.state, _planned(arguments), side_by_side=arguments.side_by_side, until=until,
            device=arguments.device, steps=arguments.steps, gpus=arguments.gpus,
        )  # fmt: skip
        return 0 if done else 3
    elif arguments.stage == "collect":
        stages.teachers(arguments.state, arguments.conditions, arguments.device)
        result = stages.collect(arguments.state, _planned(arguments), arguments.out)
        titles = {name: method.title for name, method in METHODS.items()}
        for condition in arguments.conditions:
            print(f"{condition}\n\n{summary.markdown(result, condition, titles)}")
        print("\n".join(predictions.compare(result)))
    elif arguments.stage == "split":
        for piece in models.split(arguments.file, arguments.directory, arguments.bytes):
            print(piece)
    else:
        models.join(arguments.directory.iterdir(), arguments.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
