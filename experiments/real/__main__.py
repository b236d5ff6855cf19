"""The experiment, stage by stage: `python -m experiments.real STAGE`.

    models    fetch the two pretrained models and convert them to Hugging Face directories
    texts     documents by language and source, in training, validation and test
    split     cut a file into pieces: split FILE DIRECTORY [--bytes N]
    join      put pieces together again: join DIRECTORY FILE

Every stage leaves out what is done. Nothing that is fetched belongs into a repository.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from experiments.real import models, texts


def main() -> int:
    """Run a stage; what cannot be had is one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path("runs/real"), help="models, texts and runs")
    stages = parser.add_subparsers(dest="stage", required=True)
    stages.add_parser("models")
    stages.add_parser("texts")
    cut = stages.add_parser("split")
    cut.add_argument("file", type=Path)
    cut.add_argument("directory", type=Path)
    cut.add_argument("--bytes", type=int, default=48 << 20)
    join = stages.add_parser("join")
    join.add_argument("directory", type=Path)
    join.add_argument("file", type=Path)
    arguments = parser.parse_args()
    try:
        return _run(arguments)
    except models.MissingSourceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    if arguments.stage == "models":
        models.fetch_models(arguments.state)
    elif arguments.stage == "texts":
        for name, size in texts.make_texts(arguments.state).items():
            print(f"{name:32} {size:>12,} bytes")
    elif arguments.stage == "split":
        for piece in models.split(arguments.file, arguments.directory, arguments.bytes):
            print(piece)
    else:
        models.join(arguments.directory.iterdir(), arguments.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
