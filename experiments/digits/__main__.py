"""The experiment, stage by stage: `python -m experiments.digits STAGE [--scale reduced]`.

    scratch   text, tokenizers, both teachers, the first students, the projection
    runs      the compared runs, each an `xtoken run`; `--seeds` and `--methods` choose some, `--remaining` those that
              the result file lacks
    measure   answers, bits per byte, divergences of every model that there is; adds them to the result file
    all       the three of them

Every stage leaves out what is done. `--seconds` stops a stage gracefully: what was stopped resumes when it is called
again, on this machine or on another one that was given the state's directory.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from experiments.digits import stages
from experiments.digits.methods import METHODS
from experiments.digits.settings import SCALES

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run a stage; the exit status says whether all of it is done."""
    arguments = _arguments()
    scale, state = SCALES[arguments.scale], arguments.state / arguments.scale
    state.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + arguments.seconds
    side_by_side = arguments.side_by_side or scale.side_by_side
    complete = True
    if arguments.stage in ("scratch", "all"):
        stages.scratch(state, scale, side_by_side=side_by_side)
    if arguments.stage in ("runs", "all"):
        complete = stages.runs(
            state,
            scale,
            side_by_side=side_by_side,
            until=until,
            only=tuple(arguments.methods),
            seeds=tuple(arguments.seeds),
            gpus=arguments.gpus,
            without=stages.recorded(scale, arguments.out) if arguments.remaining else frozenset(),
        )
    if arguments.stage in ("measure", "all"):
        try:
            stages.measure(state, scale, arguments.out, side_by_side=side_by_side)
        except stages.OtherStudentsError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0 if complete else 3


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["scratch", "runs", "measure", "all"])
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument("--state", type=Path, default=Path("runs/digits"), help="models, text and runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=[])
    parser.add_argument("--seeds", nargs="*", type=int, default=[])
    parser.add_argument("--remaining", action="store_true", help="only runs that the result file lacks")
    parser.add_argument("--side-by-side", type=int, default=0, help="runs at a time; 0: what the scale says")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that the runs are spread over")
    parser.add_argument("--seconds", type=float, default=500.0, help="when runs are stopped, to resume later")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
