"""Attack a queue and a control plane that serve a real run: `python -m tests.attack --seconds 300 --out RESULT.json`.

Attacks run one after the other in processes of their own, in rounds of random order, until the time is over. Meanwhile
honest clients send requests, the run trains, and memory is watched. After a fault that ended a process or left
a request without an answer the next attack has a fresh stage. The exit status is 0 if there was no fault.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.attack.attacks import ATTACKS, NO_ANSWER, run_attack
from tests.attack.stage import Stage
from tests.attack.watch import Watch

ATTACK_S = 8.0
OVERTIME_S = 60.0
CALM_S = 2.0


def attack(name: str, stage: Stage, watch: Watch, seed: int, seconds: float) -> dict[str, Any]:
    """Run one attack, and return what it and the honest clients saw."""
    context = multiprocessing.get_context("spawn")
    target = replace(stage.target, queue=random.Random(seed).choice(stage.target.queues))
    ours, theirs = context.Pipe()
    watch.take()
    began = time.monotonic()
    process = context.Process(target=run_attack, args=(name, target, seed, seconds, theirs), daemon=True)
    process.start()
    theirs.close()
    faults = []
    try:
        if not ours.poll(seconds + OVERTIME_S):
            faults.append(f"the attack did not end within {seconds + OVERTIME_S:g} s")
        elif text := ours.recv():
            faults.append(text)
    except EOFError:
        faults.append("the attack's process ended without a result")
    process.kill()
    process.join()
    time.sleep(CALM_S)
    seen = watch.take()
    ids = stage.missing_ids()
    return {
        "attack": name, "queue": target.queue.url.partition(":")[0], "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "faults": [*faults, *seen.faults, *([ids] if ids else [])], "honest_requests": seen.requests,
        "longest_wait_s": seen.longest_s, "memory_above_start_mib": {k: v >> 20 for k, v in seen.most_bytes.items()},
        "machine_longest_pause_s": seen.longest_pause_s,
    }  # fmt: skip


def order(rng: random.Random, names: list[str]) -> Iterator[str]:
    """Yield the attacks in rounds, each in a random order."""
    while True:
        yield from rng.sample(names, len(names))


def attack_for(seconds: float, seed: int, names: list[str], *, once: bool = False) -> list[dict[str, Any]]:
    """Attack for so long, or every attack once, and return one row per attack, and one for the run's end.

    Args:
        seconds: Time in all.
        seed: Seed of the order and of every attack.
        names: Attacks to run.
        once: End after one round, however long it takes.
    """
    rng, rows, began = random.Random(seed), [], time.monotonic()
    left = len(names) if once else 1 << 30
    sequence = order(rng, names)
    while left > 0 and (once or time.monotonic() < began + seconds):
        with tempfile.TemporaryDirectory(prefix="xa-") as name:
            stage = Stage(Path(name))
            watch = Watch(stage)
            ended, closed = False, ""
            try:
                while left > 0 and not ended and (once or time.monotonic() < began + seconds):
                    row = attack(next(sequence), stage, watch, rng.randrange(1 << 32), ATTACK_S)
                    left -= 1
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                    ended = any("has ended" in fault or NO_ANSWER in fault for fault in row["faults"])
            finally:
                watch.close()
                closed = stage.close()
            faults = [text for text in (stage.missing_ids(), closed) if text]
            rows.append({"attack": "end of the run", "steps": stage.steps(), "faults": faults})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    """Attack, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=None, help="default: from the clock")
    parser.add_argument("--only", nargs="+", choices=sorted(ATTACKS), default=sorted(ATTACKS), metavar="NAME")
    parser.add_argument("--once", action="store_true", help="every attack once, however long that takes")
    parser.add_argument("--out", type=Path, help="write the result there, as JSON")
    options = parser.parse_args()
    seed = time.time_ns() if options.seed is None else options.seed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the stage is closed
    rows = attack_for(options.seconds, seed, options.only, once=options.once)
    failed = sorted({row["attack"] for row in rows if row["faults"]})
    result = {
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "load": round(os.getloadavg()[1], 1)},
        "settings": {"seconds": options.seconds, "seed": seed},
        "attacks": rows, "failed": failed, "passed": not failed,
    }  # fmt: skip
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"{len(rows)} attacks, seed {seed}: " + ("no fault" if not failed else "faults in " + ", ".join(failed)))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
