"""Kills a real queue at random moments under load, starts it again, and counts what was lost or came twice.

The load are processes of their own, which write down what they were told: two producers and two consumers of a generic
partition, and the collator, teacher and trainer of a run, whose trainer sometimes rewinds.
`python -m tests.contract.killing KILLS RESULT.json [QUEUES]` runs it by hand, its kills spread over so many queues.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.contract.peers import Place
from tests.contract.processes import ROOT, UP_S, ipc_address, start_queue

MEMORY = 256 << 20
TORN = "is torn and ignored"
ROLES = ("producer-0", "producer-1", "consumer-0", "consumer-1", "run")


@dataclass
class Outcome:
    """What came of it; the three lists must be empty."""

    kills: int = 0
    puts: int = 0
    deliveries: int = 0
    acks: int = 0
    redelivered_unacked: int = 0
    steps: int = 0
    rewinds: int = 0
    torn_tails: int = 0
    journal_bytes: int = 0
    seconds: float = 0.0
    lost: list[int] = field(default_factory=list)
    after_ack: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def kill_repeatedly(directory: Path, kills: int, *, fsync: str = "interval", seed: int = 5) -> Outcome:
    """Kill a queue with a journal so many times while it works; then let its consumers finish, and compare.

    Args:
        directory: Private, with a short name; everything is written there.
        kills: How often.
        fsync: The journal's policy.
        seed: Of the moments of the kills, and of the load.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    address = ipc_address(directory / "s")
    log = (directory / "queue.log").open("wb")
    options = ("--journal", str(directory / "j"), "--fsync", fsync, "--memory-limit", str(MEMORY))
    outcome, rng, start = Outcome(kills=kills), random.Random(seed), time.monotonic()
    process = start_queue(address, *options, stderr=log)
    with ExitStack() as stack:
        stack.callback(log.close)
        load = [_start(role, address.url, directory / f"{role}.log", seed) for role in ROLES]
        try:
            for _ in range(kills):
                time.sleep(rng.uniform(0.05, 0.5))
                process.send_signal(signal.SIGKILL)
                process.wait()
                outcome.journal_bytes += sum(f.stat().st_size for f in (directory / "j").glob("*.journal*"))
                process = start_queue(address, *options, stderr=log)
            time.sleep(0.5)
        finally:
            _stop(load, outcome)
        _drain(Place("library", address=address), directory / "drain.log")
        process.terminate()
        process.wait(UP_S)
    outcome.torn_tails = (directory / "queue.log").read_text().count(TORN)
    outcome.seconds = time.monotonic() - start
    _compare(directory, outcome)
    return outcome


def _start(role: str, url: str, log: Path, seed: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.contract.killing_load", role, url, str(log), str(seed)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)


def _stop(load: list[subprocess.Popen[bytes]], outcome: Outcome) -> None:
    for process in load:
        process.stdin.close()
    for process, role in zip(load, ROLES, strict=True):
        try:
            status = process.wait(UP_S * 2)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        if status:
            outcome.errors.append(f"{role} ended with status {status}")


def _drain(place: Place, log: Path) -> None:
    """One last consumer takes all that is left."""
    last = place.worker()
    with log.open("w") as file:
        while True:
            sent = time.monotonic_ns()
            found = last.call("claim", partition="p", task="a", count=64)
            if found is None:
                break
            file.writelines(json.dumps(["got", sent, i]) + "\n" for i in found["ids"])
            last.call("ack", partition="p", task="a", ids=found["ids"])
            file.writelines(json.dumps(["acked", time.monotonic_ns(), i]) + "\n" for i in found["ids"])
    place.leave()


def _compare(directory: Path, outcome: Outcome) -> None:
    """A sample was put once its put was answered, and done once its ack was; deliveries count from when asked for."""
    put: set[int] = set()
    acked: dict[int, int] = {}
    asked: list[tuple[int, int]] = []
    for kind, at, what in _events(directory):
        match kind:
            case "put":
                put.add(int(what))
            case "got":
                asked.append((int(what), at))
            case "acked":
                acked[int(what)] = min(at, acked.get(int(what), at))
            case "step":
                outcome.steps += 1
            case "rewind":
                outcome.rewinds += 1
            case "lost" | "after_ack":
                getattr(outcome, kind).append(int(what))
            case "error":
                outcome.errors.append(str(what))
    got = Counter(i for i, _ in asked)
    outcome.puts, outcome.deliveries, outcome.acks = len(put), len(asked), len(acked)
    outcome.redelivered_unacked = sum(n - 1 for n in got.values())
    outcome.lost += sorted(put - set(got))
    outcome.after_ack += sorted({i for i, at in asked if at > acked.get(i, at)})


def _events(directory: Path) -> Iterator[tuple[str, int, int | str]]:
    for log in sorted(directory.glob("*.log")):
        if log.name != "queue.log":
            yield from (json.loads(line) for line in log.read_text().splitlines())


def sum_of(outcomes: list[Outcome]) -> Outcome:
    """Add up several; the time is the longest."""
    total = Outcome()
    for one in outcomes:
        for name, value in vars(one).items():
            setattr(total, name, getattr(total, name) + value)
    total.seconds = max(one.seconds for one in outcomes)
    return total


def main(kills: int, result: Path, queues: int = 1) -> int:
    """Run it, write the counts, and return 0 if nothing went wrong."""
    directory = Path(tempfile.mkdtemp(prefix="xk-"))
    parts = [kills // queues + (number < kills % queues) for number in range(queues)]

    def one(number: int) -> Outcome:
        return kill_repeatedly(directory / str(number), parts[number], seed=5 + number)

    with ThreadPoolExecutor(queues) as threads:
        outcome = sum_of(list(threads.map(one, range(queues))))
    result.write_text(json.dumps({"queues": queues, **asdict(outcome)}, indent=2) + "\n")
    print(result.read_text())
    shutil.rmtree(directory)
    return 1 if outcome.lost or outcome.after_ack or outcome.errors else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:])))
