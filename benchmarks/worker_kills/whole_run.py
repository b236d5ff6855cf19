"""A whole run whose workers are killed, beside two that are left alone: `python -m benchmarks.worker_kills.whole_run`.

The models of `benchmarks.end_to_end`, eager, with fewer layers if wanted; all three runs have the same settings and
seed and share the machine. The killed one loses its teacher or its trainer at random moments and resumes from its
checkpoints. Compared are the ids of every step, in their order, and the losses; how far the two undisturbed runs differ
is the noise of a run. Writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.bounds import resume_bounds
from benchmarks.harness import command_line, gpu_bytes_used, write_result
from benchmarks.worker_kills.__main__ import DEADLINE_S, LIMIT, memory_at_rest
from benchmarks.worker_kills.lane import VICTIMS, Lane
from tests.support.forks import ForkLauncher
from xtoken_core.config.spec import RunSpec
from xtoken_services.common.run.status import RunState

RUNS = ("undisturbed", "undisturbed again", "killed")
NEVER = 1_000_000
TIMES_NOISE = 2.0
"""The killed run may differ this many times as much as the undisturbed ones do, on the mean over steps."""

SpecOf = Callable[[Path, int], RunSpec]
"""A run's settings, by its directory and its steps between two checkpoints."""


def compare(spec_of: SpecOf, directory: Path, *, kills: int, checkpoint_every: int, seed: int = 3) -> dict[str, Any]:
    """Run all three side by side, kill workers of the last.

    Args:
        spec_of: Their settings.
        directory: Their outputs go below it.
        kills: Of the last run's teacher or trainer.
        checkpoint_every: Steps between two checkpoints of the last run; the others write only one, at their end.
        seed: Of what is killed when.

    Raises:
        RuntimeError: A run has failed, or has ended before it was killed often enough.
    """
    began, at_start = time.monotonic(), gpu_bytes_used()
    launcher = ForkLauncher()
    lanes: list[Lane] = []
    try:
        for place, name in enumerate(RUNS):
            every = checkpoint_every if name == "killed" else NEVER
            lanes.append(Lane(spec_of(directory / name.replace(" ", "-"), every), launcher, seed + place))
        with ThreadPoolExecutor(len(lanes)) as pool:
            attacked = pool.submit(_kill, lanes[-1], kills)
            endings = [lane.join(600) for lane in lanes]
            attacked.result()
    finally:
        for lane in lanes:
            lane.close()
        launcher.close()
    for lane, ending in zip(lanes, endings, strict=True):
        if ending.state != RunState.COMPLETED:
            raise RuntimeError(f"{lane.spec.output}: {ending.error}")
    lines = {name: _lines(lane.spec.output) for name, lane in zip(RUNS, lanes, strict=True)}
    at_end = memory_at_rest(at_start + LIMIT)
    return {
        **verdict(lines),
        "losses": {name: [line["loss"] for line in rows] for name, rows in lines.items()},
        "kills": [asdict(kill) for kill in lanes[-1].kills],
        "deadline_s": DEADLINE_S,
        "memory_not_returned": at_end - at_start,
        "memory_limit": LIMIT,
        "checkpoint_every": checkpoint_every,
        "seconds": time.monotonic() - began,
    }


def verdict(lines: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Compare the killed run with the others: trained ids and losses."""
    first, again, killed = (lines[name] for name in RUNS)
    ids = [i for line in killed for i in line["ids"]]
    return {
        "each_id_once": sorted(ids) == list(range(len(ids))),
        "same_ids_in_order": [line["ids"] for line in killed] == [line["ids"] for line in first],
        "noise": _differences(again, first),
        "difference": _differences(killed, first),
        "times_noise_allowed": TIMES_NOISE,
    }


def _differences(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, float]:
    found = [abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True)]
    return {"mean": statistics.fmean(found), "largest": max(found)}


def _kill(lane: Lane, kills: int) -> None:
    lane.paired(seconds=240)
    for _ in range(kills):
        time.sleep(lane.rng.uniform(0.0, 1.5))
        done = lane.kill(lane.rng.choice(VICTIMS), paired=True)
        lane.await_report(done)
        lane.await_pair(done)


def _lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "steps.jsonl").read_text(encoding="utf-8").splitlines()]


def _real_shapes(work: Path, arguments: argparse.Namespace) -> SpecOf:
    from benchmarks.end_to_end.assets import make_assets
    from benchmarks.end_to_end.pipeline import complete
    from benchmarks.end_to_end.variants import VARIANTS, run_spec

    documents = arguments.samples * arguments.steps
    assets = make_assets(
        work, small=arguments.small, documents=documents, characters=6 * arguments.context, layers=arguments.layers
    )

    def spec_of(directory: Path, checkpoint_every: int) -> RunSpec:
        raw = run_spec(VARIANTS["p_kl_eager"], arguments)
        raw["train"] |= {"checkpoint_every": checkpoint_every, "keep_checkpoints": 1}
        raw["workers"] |= {"max_restarts": 100}
        return RunSpec.model_validate(complete(raw, assets, directory / "out"))

    return spec_of


def main() -> int:
    """Run, write, say what came of it."""
    parser = command_line(__doc__, "resume")
    parser.add_argument("--work", type=Path, default=Path("runs/end-to-end"), help="models, text and runs")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoint-every", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--layers", type=int, help="of both models, if not all")
    parser.add_argument("--small", action="store_true", help="thin models: to try the script on a CPU")
    arguments = parser.parse_args()
    arguments.warmup = 0
    spec_of = _real_shapes(arguments.work, arguments)
    result = compare(spec_of, arguments.work, kills=arguments.kills, checkpoint_every=arguments.checkpoint_every)
    result["machine"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    result["layers"] = arguments.layers
    result["holds"] = all(bound.holds for bound in resume_bounds(result))
    write_result(arguments.out, result)
    print(json.dumps({name: value for name, value in result.items() if name not in ("losses", "kills")}, indent=1))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
