"""Kill teachers and trainers of several small runs at random moments: `python -m benchmarks.worker_kills`.

Models of two layers; every run has its queue, collator, teacher and trainer. In every round one of the two is killed in
each run while they train, and sometimes one more while the first is on its way back. A round ends when all sessions are
pairs again and train; then the GPU's memory is compared. Writes JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.bounds import kill_bounds
from benchmarks.harness import command_line, gpu_bytes_used, write_result
from benchmarks.worker_kills.lane import VICTIMS, Lane, trained_ids
from tests.support.forks import ForkLauncher
from tests.support.tiny_run import make_assets, tiny_spec
from xtoken_core.config.spec import RunSpec
from xtoken_services.common.processes.worker import SILENCE_S, WAIT_S
from xtoken_services.common.run.status import RunState

DEADLINE_S = SILENCE_S + WAIT_S
"""A lost session is noticed after its silence at the latest, and heard of with the next answer."""
MIB = 1 << 20
LIMIT = 64 * MIB
RECORDS = 60_000
"""More than a run can train while it is killed; it is stopped."""
WIDE_HEAD = 8192
"""Rows of the teacher's head beyond its vocabulary: a ring of 12 slots then takes 127 MiB, which a leak would show."""


@dataclass
class Outcome:
    """Outcome of the kills. Bytes are the whole device's; a run's are two processes'.

    Attributes:
        used_at_start: Before anything was started.
        used_paired: When all runs had begun to train.
        used_after_rounds: After each round.
        used_at_end: After everything has ended.
    """

    device: str
    runs: int
    rounds: int
    kills: list[dict[str, Any]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    used_at_start: int = 0
    used_paired: int = 0
    used_after_rounds: list[int] = field(default_factory=list)
    used_at_end: int = 0
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return counts and times, for those who read only a few lines."""
        reports = [kill["reported_s"] for kill in self.kills if kill["paired"]]
        again = [kill["paired_s"] for kill in self.kills if kill["paired_s"] is not None]
        return {
            "kills": {victim: sum(kill["victim"] == victim for kill in self.kills) for victim in VICTIMS},
            "kills_while_pairing": sum(not kill["paired"] for kill in self.kills),
            "unreported": sum(seconds is None for seconds in reports),
            "slowest_report_s": max((seconds for seconds in reports if seconds is not None), default=None),
            "deadline_s": DEADLINE_S,
            "pair_again_s": {"median": statistics.median(again), "slowest": max(again)} if again else {},
            "memory_not_returned": self.used_at_end - self.used_at_start,
            "most_growth_of_a_run": max((u - self.used_paired for u in self.used_after_rounds), default=0) // self.runs,
            "memory_limit": LIMIT,
        }

    def holds(self) -> bool:
        """Return whether every bound holds."""
        return all(bound.holds for bound in kill_bounds(self.summary(), self.errors))


def kill_repeatedly(directory: Path, *, runs: int, rounds: int, kills: int, device: str, seed: int = 11) -> Outcome:
    """Kill at least so many workers, as many rounds as that takes but no more than `rounds`.

    Args:
        directory: Everything is written there.
        runs: How many are killed at a time.
        rounds: Rounds at most.
        kills: Enough.
        device: `cuda` or `cpu`; on a CPU the signal goes through shared memory and no memory is compared.
        seed: Of what is killed when.
    """
    on_gpu = device == "cuda"
    used: Callable[[], int] = gpu_bytes_used if on_gpu else int  # on a CPU no memory is compared
    outcome = Outcome(torch.cuda.get_device_name() if on_gpu else "cpu", runs, 0)
    began = time.monotonic()
    assets = make_assets(directory / "assets", layers=2, extra_rows=WIDE_HEAD if on_gpu else 16)
    outcome.used_at_start = used()
    launcher = ForkLauncher()  # workers start in a second or two
    lanes: list[Lane] = []
    try:
        for index in range(runs):
            lanes.append(Lane(_spec(assets, directory / f"run-{index}", device), launcher, seed * 1000 + index))
        with ThreadPoolExecutor(runs) as pool:
            list(pool.map(Lane.paired, lanes))
            outcome.used_paired = used()
            while outcome.rounds < rounds and sum(len(lane.kills) for lane in lanes) < kills:
                list(pool.map(_round, lanes))
                outcome.rounds += 1
                outcome.used_after_rounds.append(used())
            list(pool.map(_stop, lanes))
    except RuntimeError as error:
        outcome.errors.append(str(error))
    finally:
        for lane in lanes:
            lane.close()
        launcher.close()
    outcome.used_at_end = memory_at_rest(outcome.used_at_start + LIMIT, used)
    outcome.kills = [asdict(kill) for lane in lanes for kill in lane.kills]
    for lane in lanes:
        ids = trained_ids(lane.spec.output)
        outcome.steps.append(lane.step() + 1)
        if ids != list(range(len(ids))) or not ids:
            outcome.errors.append(f"{lane.spec.output}: steps.jsonl does not have each id once")
    outcome.seconds = time.monotonic() - began
    return outcome


def _spec(assets: Any, directory: Path, device: str) -> RunSpec:
    transport = "cuda_ipc" if device == "cuda" else "shared_memory"
    workers = {"collators": 1, "device": device, "transport": transport, "slots": 12, "max_restarts": 1000}
    return tiny_spec(assets, directory, records=RECORDS, workers=workers)


def _round(lane: Lane) -> None:
    """Kill a worker while the pair trains; after every fourth report another one, while the pair is rebuilt."""
    time.sleep(lane.rng.uniform(0.0, 1.0))
    done = lane.kill(lane.rng.choice(VICTIMS), paired=True)
    lane.await_report(done)
    if lane.rng.random() < 0.25:
        time.sleep(lane.rng.uniform(0.0, 1.0))
        done = lane.kill(lane.rng.choice(VICTIMS), paired=False)
    lane.await_pair(done)


def _stop(lane: Lane) -> None:
    lane.supervisor.stop()
    if lane.join(60).state != RunState.STOPPED:
        raise RuntimeError(f"{lane.spec.output}: {lane.ending}")


def memory_at_rest(limit: int, used: Callable[[], int] = gpu_bytes_used, seconds: float = 20.0) -> int:
    """Return the device's use once it has fallen to a limit, or what it is after that time."""
    deadline = time.monotonic() + seconds
    while used() > limit and time.monotonic() < deadline:
        time.sleep(0.1)
    return used()


def main() -> int:
    """Kill, write, say what came of it."""
    parser = command_line(__doc__, "worker_kills")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=100, help="at most")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="worker-kills-") as place:
        outcome = kill_repeatedly(
            Path(place), runs=arguments.runs, rounds=arguments.rounds, kills=arguments.kills, device=arguments.device
        )
    result = {"holds": outcome.holds(), "summary": outcome.summary(), **asdict(outcome)}
    write_result(arguments.out, result)
    print(json.dumps({"holds": outcome.holds(), **outcome.summary(), "errors": outcome.errors}, indent=1))
    return 0 if outcome.holds() else 1


if __name__ == "__main__":
    sys.exit(main())
