"""Attack a queue and a control plane that serve a real run: `python -m tests.attack --seconds 300 --out RESULT.json`.

Attacks run one after the other in processes of their own, in rounds of random order, until the time is over. Meanwhile
honest clients send requests, the run trains, and memory is watched. Waiting is measured by the time that other
processes leave the machine (`tests.attack.free_time`): on an idle machine that is the wall clock's. After a fault that
ended a process or left a request without an answer the next attack has a fresh stage. The exit status is 0 if there was
no fault.
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import zmq

from tests.attack.attacks import ATTACKS, NO_ANSWER, run_attack
from tests.attack.stage import Stage
from tests.attack.watch import LONGEST_WAIT_S, MARGIN, Watch, bound_of
from xtoken_core.atomic import atomic_write

ATTACK_S = 8.0
OVERTIME_S = 60.0
CALM_S = 2.0
POLL_S = 0.2
UNENDED = "the attack did not end"
STAGE_IS_SPENT = ("has ended", NO_ANSWER, UNENDED)
"""Faults after which the next attack has a fresh stage: files that an attack replaced may be left."""


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
    faults, started = [], target.clock.now()
    try:
        while not ours.poll(POLL_S) and target.clock.since(started) < seconds + OVERTIME_S:
            pass
        if not ours.poll():
            faults.append(f"{UNENDED} within {seconds + OVERTIME_S:g} s")
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
        "faults": [*faults, *seen.faults, *([ids] if ids else [])], "ids_exact": not ids,
        "honest_requests": seen.requests,
        "longest_wait_s": seen.longest_s,
        "longest_wall_s": seen.longest_wall_s,
        "foreign_load": round(fmean(seen.foreign_load or [0.0]), 2),
        "memory_above_start_mib": {k: v >> 20 for k, v in seen.most_bytes.items()},
        "machine_longest_pause_s": seen.longest_pause_s,
    }  # fmt: skip


def order(rng: random.Random, names: list[str]) -> Iterator[str]:
    """Yield the attacks in rounds, each in a random order."""
    while True:
        yield from rng.sample(names, len(names))


def attack_for(
    seconds: float, seed: int, names: list[str], *, once: bool = False,
    keep: Callable[[list[dict[str, Any]]], None] = lambda _: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Attack for so long, or every attack once, and return one row per attack, and one for the run's end.

    Args:
        seconds: Time from the first attack, also for preparing further stages.
        seed: Seed of the order and of every attack.
        names: Attacks to run.
        once: End after one round, however long it takes.
        keep: Called with all rows after every attack.
    """
    rng, rows, end = random.Random(seed), [], math.inf
    left = len(names) if once else 1 << 30
    sequence = order(rng, names)
    while left > 0 and time.monotonic() < end:
        with tempfile.TemporaryDirectory(prefix="xa-") as name:
            stage = Stage(Path(name))
            if not once and not rows:
                end = time.monotonic() + seconds
            watch = Watch(stage)
            ended, closed = False, ""
            try:
                while left > 0 and not ended and time.monotonic() < end:
                    row = attack(next(sequence), stage, watch, rng.randrange(1 << 32), ATTACK_S)
                    left -= 1
                    rows.append(row)
                    keep(rows)
                    print(json.dumps(row), flush=True)
                    ended = any(reason in fault for fault in row["faults"] for reason in STAGE_IS_SPENT)
            finally:
                watch.close()
                closed = stage.close()
            ids = stage.missing_ids()
            faults = [text for text in (ids, closed) if text]
            rows.append({"attack": "end of the run", "steps": stage.steps(), "faults": faults, "ids_exact": not ids})
            keep(rows)
            print(json.dumps(rows[-1]), flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return counts, bounds and extremes of all attacks.

    Args:
        rows: As returned by `attack_for`.
    """
    attacks = [row for row in rows if "seed" in row]
    failed = sorted({row["attack"] for row in rows if row["faults"]})
    waits = [(seconds, what, row["attack"]) for row in attacks for what, seconds in row["longest_wait_s"].items()]
    slowest, what, during = max(waits, default=(0.0, "", ""))
    memory = {
        name: {
            "most_mib": max(row["memory_above_start_mib"].get(name, 0) for row in attacks),
            "bound_mib": bound_of(name) >> 20,
        }
        for name in sorted({name for row in attacks for name in row["memory_above_start_mib"]})
    }
    return {
        "passed": bool(attacks) and not failed, "failed": failed, "attacks": len(attacks),
        "attacks_by_name": dict(sorted(Counter(row["attack"] for row in attacks).items())),
        "honest_requests": sum(row["honest_requests"] for row in attacks),
        "slowest_honest_request": {"seconds": slowest, "bound_s": LONGEST_WAIT_S, "request": what, "during": during},
        "slowest_by_wall_clock_s": max((s for row in attacks for s in row["longest_wall_s"].values()), default=0.0),
        "foreign_load": round(fmean([row["foreign_load"] for row in attacks] or [0.0]), 2),
        "memory_above_start": memory, "margin": MARGIN,
        "runs": [row["steps"] for row in rows if "steps" in row],
        "ids_exact": all(row["ids_exact"] for row in rows),
    }  # fmt: skip


def machine() -> dict[str, Any]:
    """Describe machine and versions."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    names = ("xtoken", "torch", "pyzmq", "uvicorn", "fastapi", "pydantic", "sqlalchemy")
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "processor": model, "cpus": os.cpu_count(), "kernel": platform.release(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1), "load": round(os.getloadavg()[1], 1),
        },
        "versions": {
            "python": platform.python_version(), "libzmq": zmq.zmq_version(), **{name: version(name) for name in names}
        },
    }  # fmt: skip


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
    began = time.monotonic()
    described = machine()

    def keep(rows: list[dict[str, Any]]) -> None:
        result = {**summary(rows), "seconds": round(time.monotonic() - began), "seed": seed, **described, "rows": rows}
        if options.out is not None:
            atomic_write(options.out, json.dumps(result, indent=1) + "\n")

    rows = attack_for(options.seconds, seed, options.only, once=options.once, keep=keep)
    seen = summary(rows)
    print(f"{seen['attacks']} attacks, seed {seed}: faults in {', '.join(seen['failed']) or 'none'}")
    return int(not seen["passed"])


if __name__ == "__main__":
    sys.exit(main())
