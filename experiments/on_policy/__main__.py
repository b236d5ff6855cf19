"""On-policy, half on-policy and off-policy chain at equal student tokens: `python -m experiments.on_policy`.

Continues with the teacher and the first students of `python -m experiments.digits scratch`, whose directory is
`--state`, and makes those that are missing. A call leaves out what is done; runs that are stopped after `--seconds`
resume in the next one. Writes `results/SCALE.json`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.digits.methods import CROSS
from experiments.digits.settings import SCALES, Scale
from experiments.digits.stages import machine, run_record, scratch
from experiments.jobs import Job, finished, run_all
from experiments.on_policy.lengths import Lengths, measure_lengths
from experiments.on_policy.measured import measured
from experiments.on_policy.methods import METHODS, file_of, planned, run_name
from xtoken_core.atomic import atomic_write

RESULTS = Path(__file__).parent / "results"
MAX_NEW_TOKENS = {"full": 72, "reduced": 64}
ROLLOUT = ("completions", "completion_tokens", "finished", "staleness", "entropy", "generated_tokens_per_second")
WAITS = ("data_wait", "teacher_wait", "rollout_wait")


def main() -> int:
    """Train and measure; the exit status is 3 if not all is done."""
    arguments = _arguments()
    scale, state = SCALES[arguments.scale], arguments.state / arguments.scale
    state.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + arguments.seconds
    first = (CROSS, *(f"student-{seed}" for seed in range(scale.seeds)))
    if not all((state / name).is_dir() for name in first) or not (state / "projection.safetensors").is_file():
        scratch(state, scale, side_by_side=len(first), only=first)
    lengths = [_lengths(state, scale, seed) for seed in range(scale.seeds)]
    wanted = [run for run in planned(scale) if not arguments.methods or run[0] in arguments.methods]
    jobs = []
    for name, seed in sorted(wanted, key=lambda run: -METHODS[run[0]].fraction):  # the slowest first
        steps = lengths[seed].steps(name, arguments.steps or scale.go_on.steps)
        text = file_of(scale, name, seed, steps=steps, max_new_tokens=MAX_NEW_TOKENS[scale.name])
        jobs.append(Job(run_name(name, seed), text))
    complete = run_all(state, jobs, side_by_side=arguments.side_by_side or scale.side_by_side, until=until)
    done = [run for run in planned(scale) if finished(state, run_name(*run))]
    models = {CROSS: state / CROSS, **{f"student-{s}": state / f"student-{s}" for s in range(scale.seeds)}}
    models |= {run_name(*run): state / "runs" / run_name(*run) / "model" for run in done}
    with multiprocessing.get_context("spawn").Pool(arguments.side_by_side or scale.side_by_side) as pool:
        found = dict(
            zip(models, pool.starmap(measured, [(state, scale, *each) for each in models.items()]), strict=True)
        )
    result = {
        "settings": {"scale": scale.plain(), "max_new_tokens": MAX_NEW_TOKENS[scale.name], "steps": arguments.steps},
        "machine": machine(),
        "lengths": [vars(each) for each in lengths],
        "teacher": found[CROSS],
        "students": [found[f"student-{seed}"] for seed in range(scale.seeds)],
        "runs": [
            {"method": name, "seed": seed, **found[run_name(name, seed)], **_of_run(state, run_name(name, seed))}
            for name, seed in done
        ],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    atomic_write(arguments.out / f"{scale.name}.json", json.dumps(result, indent=1) + "\n")
    return 0 if complete else 3


def _lengths(state: Path, scale: Scale, seed: int) -> Lengths:
    file = state / f"lengths-{seed}.json"
    if not file.is_file():
        lengths = measure_lengths(state, scale, seed, max_new_tokens=MAX_NEW_TOKENS[scale.name])
        atomic_write(file, json.dumps(vars(lengths)))
    return Lengths(**json.loads(file.read_text(encoding="utf-8")))


def _of_run(state: Path, name: str) -> dict[str, Any]:
    run = state / "runs" / name
    lines = [json.loads(line) for line in (run / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        **run_record(run),
        "seconds": lines[-1]["time"] - lines[0]["time"],
        "means": {column: _mean(lines, column) for column in (*ROLLOUT, *WAITS)},
    }


def _mean(lines: list[Mapping[str, Any]], column: str) -> float | None:
    values = [line[column] for line in lines if column in line]
    return sum(values) / len(values) if values else None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="reduced")
    parser.add_argument("--state", type=Path, default=Path("runs/digits"), help="models, text and runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=[])
    parser.add_argument("--steps", type=int, default=0, help="steps of given text; 0: what the scale says")
    parser.add_argument("--side-by-side", type=int, default=0, help="runs at a time; 0: what the scale says")
    parser.add_argument("--seconds", type=float, default=3600.0, help="when runs are stopped, to resume later")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
