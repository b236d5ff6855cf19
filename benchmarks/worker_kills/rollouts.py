"""Kill the workers of an on-policy run at random moments: `python -m benchmarks.worker_kills.rollouts`.

A tiny run on CPU whose steps are half prompts. Rollout worker, trainer (also while it publishes weights) and queue are
killed; after each kill the run must take a step. At the end every id was trained once and in order, no completion by
weights older than the bound was trained, and neither weights nor sockets are left. Writes JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import command_line, write_result
from benchmarks.worker_kills.lane import Lane
from tests.support.forks import ForkLauncher
from tests.support.tiny_run import make_assets, tiny_spec
from tests.support.trained_student import train_briefly
from xtoken_services.common.generation.published_weights import weights_file
from xtoken_services.common.run.resolve import resolve_run
from xtoken_services.common.run.status import RunState

VICTIMS = {"rollout-0": 5, "trainer-0": 4, "queue": 1}
"""What is killed, and how often of ten kills."""
RECORDS = 60_000
MAX_STALENESS = 1
PUBLISH_S = 3.0
"""Maximum of seconds to wait for a publication."""
LIMIT_S = 600.0
"""Maximum of seconds until the run has taken a step after a kill."""


@dataclass
class Outcome:
    """Outcome of the kills.

    Attributes:
        kills: Number of kills by victim.
        while_publishing: Kills of the trainer that left a file of weights half written.
        steps: Optimiser steps that were taken.
        stalest: Largest mean staleness of a step.
        skipped: Positions without a row: the student wrote bytes that are no text.
        back_s: Seconds from each kill to the second step after it.
        errors: What did not hold.
    """

    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(VICTIMS, 0))
    while_publishing: int = 0
    steps: int = 0
    stalest: float = 0.0
    skipped: int = 0
    back_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0


def kill_repeatedly(directory: Path, *, kills: int, seed: int = 3) -> Outcome:
    """Kill so many workers of one run.

    Args:
        directory: Everything is written there.
        kills: How many.
        seed: Of what is killed when.
    """
    outcome, began = Outcome(), time.monotonic()
    assets = make_assets(directory / "assets")
    train_briefly(assets.student)
    rollout = {"fraction": 0.5, "max_new_tokens": 10, "prompt_characters": 40, "publish_every": MAX_STALENESS + 1}
    spec = tiny_spec(
        assets, directory / "run", records=RECORDS, rollout={**rollout, "max_staleness": MAX_STALENESS},
        workers={"collators": 1, "device": "cpu", "max_restarts": 1000}, train={"checkpoint_every": 3},
        loss={"mode": "p_kl", "beta": None},
    )  # fmt: skip
    weights = weights_file(resolve_run(spec))
    launcher = ForkLauncher()
    lane = Lane(spec, launcher, seed)
    try:
        lane.paired(LIMIT_S)
        for _ in range(kills):
            time.sleep(lane.rng.uniform(0.0, 1.0))
            victim = lane.rng.choices(list(VICTIMS), weights=list(VICTIMS.values()))[0]
            outcome.kills[victim] += _kill(lane, victim, outcome, weights)
        lane.supervisor.stop()
        if lane.join(LIMIT_S).state != RunState.STOPPED:
            outcome.errors.append(f"the run has ended otherwise: {lane.ending}")
    except RuntimeError as error:
        outcome.errors.append(str(error))
    finally:
        lane.close()
        launcher.close()
    _check(outcome, spec.output, weights)
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def _kill(lane: Lane, victim: str, outcome: Outcome, weights: Path) -> int:
    """Kill a worker, half of the time a trainer while it publishes; wait for two more lines of `steps.jsonl`."""
    pid = lane.wait(lambda: lane.pid(victim), LIMIT_S)
    if victim == "trainer-0" and lane.rng.random() < 0.5:
        deadline = time.monotonic() + PUBLISH_S
        while not _scratch(weights) and time.monotonic() < deadline:
            pass
    os.kill(pid, signal.SIGKILL)
    began, at = time.monotonic(), time.time()
    if victim == "trainer-0":
        time.sleep(0.02)  # the process may finish a system call
        outcome.while_publishing += bool(_scratch(weights))
    lane.wait(lambda: _lines_after(lane, at) >= 2, LIMIT_S)
    outcome.back_s.append(round(time.monotonic() - began, 2))
    return 1


def _scratch(weights: Path) -> list[str]:
    """Return the names of files of weights that are being written, or were when their trainer was killed."""
    return [path.name for path in weights.parent.glob(f".{weights.name}.*")]


def _lines_after(lane: Lane, at: float) -> int:
    """Count the lines of `steps.jsonl` that are younger than a time."""
    lines = (lane.spec.output / "steps.jsonl").read_text(encoding="utf-8").split("\n")[-4:-1]
    return sum(json.loads(line)["time"] > at for line in lines if line)


def _check(outcome: Outcome, output: Path, weights: Path) -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in (output / "steps.jsonl").read_text().splitlines()]
    outcome.steps, outcome.stalest = len(lines), max(line.get("staleness", 0) for line in lines)
    outcome.skipped = sum(len(line["skipped"]) for line in lines)
    for at, line in enumerate(lines):
        if sorted(line["ids"] + line["skipped"]) != list(range(8 * at, 8 * at + 8)) or line["dead"]:
            outcome.errors.append(f"step {line['step']} does not have each of its positions once")
        if line.get("completions", 0) != sum(i % 8 >= 4 for i in line["ids"]):
            outcome.errors.append(f"step {line['step']} has another number of completions than of prompts")
    if outcome.stalest > MAX_STALENESS:
        outcome.errors.append(f"completions of a staleness of {outcome.stalest} were trained")
    left = [str(path) for path in weights.parent.iterdir() if weights.name in path.name]
    if left:
        outcome.errors.append(f"weights are left: {left}")


def main() -> int:
    """Kill, write, and print the result."""
    parser = command_line(__doc__, "rollout_kills")
    parser.add_argument("--kills", type=int, default=100)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollout-kills-") as directory:
        outcome = kill_repeatedly(Path(directory), kills=arguments.kills)
    write_result(arguments.out, asdict(outcome))
    print(json.dumps({**asdict(outcome), "back_s": max(outcome.back_s, default=None)}, indent=1))
    return 1 if outcome.errors else 0


if __name__ == "__main__":
    sys.exit(main())
