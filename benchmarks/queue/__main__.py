"""The transfer queue beside TransferQueue and raw pyzmq, in one run: `python -m benchmarks.queue`.

Everything crosses loopback, from one producer process and one consumer process. Rates are samples per second. Rounds of
the queue and of raw pyzmq alternate, and medians over the rounds are compared. Writes `benchmarks/results/queue.json`
and the figures in `docs/performance.md`; the exit status is 1 if a bound does not hold.

Write rate of the disk under a journal: batches written one after the other, flushed every 100 ms, as a journal is.

As many are written before as are timed, since a queue's journal has had as many when its second puts are timed.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import tempfile
import threading
import time
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import command_line, processor, write_result
from benchmarks.queue import crowd, latency, ours, plain, workload
from benchmarks.queue.bounds import queue_bounds
from benchmarks.queue.workload import BATCH, BATCHES, batch, buffers_of
from xtoken_core.data_plane.address import Address
from xtoken_services.supervisor.launchers.local import LOOPBACK, free_port

ROUNDS = 5
IN_FLIGHT = (1, 4)
TRANSPORTS = ("ipc", "tcp")
HERE = Path(__file__).parent
NAMESPACE = ours.ROOT / "tests" / "support" / "loopback.sh"
PEER_PYTHON = ours.ROOT / ".venv-transferqueue" / "bin" / "python"
PEER_S = 240.0
FSYNC_S = 0.1


class Places:
    """Fresh addresses and directories."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._numbers = count(1)

    def url(self, transport: str) -> str:
        """Return an unused address."""
        if transport == "ipc":
            return f"ipc://{self.directory}/{next(self._numbers)}"
        return f"tcp://{LOOPBACK}:{free_port(LOOPBACK)}"

    def address(self, transport: str = "ipc") -> Address:
        """Return the address of a queue, with a token where it needs one."""
        url = self.url(transport)
        return Address.parse(url, self.directory / f"token-{next(self._numbers)}" if transport == "tcp" else None)

    def journal(self) -> Path:
        """Return a directory for a journal."""
        return self.directory / f"journal-{next(self._numbers)}"


def transferqueue(python: Path) -> dict[str, Any]:
    """Measure the package TransferQueue, or return why it was not measured."""
    if not python.exists():
        return {"skipped": f"no {python}: `make bench-queue-peer` installs it"}
    command = [str(NAMESPACE), str(python), str(HERE / "transferqueue" / "measure.py")]
    if subprocess.run([command[0], "true"], capture_output=True, check=False).returncode:
        return {"skipped": "this user may not make a network namespace, and Ray binds more than loopback outside one"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_S, check=False)
    except subprocess.TimeoutExpired:
        return {"skipped": f"it did not end within {PEER_S:g} s"}
    if done.returncode:
        return {"skipped": f"it failed: {done.stderr.strip()[-500:]}"}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def median(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each measurement."""
    return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}


def rates(places: Places, rounds_wanted: int) -> dict[str, Any]:
    """Put and get through the queue and through raw pyzmq, by transport and requests in flight."""
    found: dict[str, Any] = {"ours": {}, "plain": {}, "rounds": {}}
    for transport in TRANSPORTS:
        for in_flight in IN_FLIGHT:
            mine, theirs = [], []
            for _ in range(rounds_wanted):
                theirs.append(plain.measure(places.url(transport), in_flight))
                mine.append(ours.measure(places.address(transport), in_flight))
            key = f"{transport}_{in_flight}"
            found["ours"][key], found["plain"][key] = median(mine), median(theirs)
            found["rounds"][key] = {"ours": mine, "plain": theirs}
    return found


def journal(places: Places, rounds_wanted: int) -> dict[str, Any]:
    """Put without a journal, with one, and what the disk below it takes, one after the other."""
    rounds = []
    for _ in range(rounds_wanted):
        without = ours.measure_put(places.address())
        kept = ours.measure_put(places.address(), "--journal", str(places.journal()))
        written = measure_disk(places.directory)
        rounds.append(
            {"put_without": without, "put": kept, "disk": written["put"], "disk_bytes_per_s": written["bytes_per_s"]}
        )
    return median(rounds) | {"rounds": rounds}


def machine() -> dict[str, Any]:
    """Describe the machine and its load."""
    block = bytes(1 << 28)
    start = time.perf_counter()
    copied = bytearray(block)
    memcpy = len(copied) / (time.perf_counter() - start)
    return {
        "processor": processor(),
        "cpus": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "memcpy_gb_per_s": memcpy / 1e9,
        "load_at_start": os.getloadavg()[0],
    }


def measure(rounds_wanted: int) -> dict[str, Any]:
    """Measure everything."""
    start = time.perf_counter()
    result: dict[str, Any] = {
        "taken_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("pyzmq", "msgspec", "torch", "tensordict")},
        "workload": {
            "batch": workload.BATCH, "batches": workload.BATCHES, "get_passes": workload.PASSES,
            "rounds": rounds_wanted,
            "tokens": [workload.SHORTEST, workload.LONGEST],
            "bytes_per_batch": sum(buffer.nbytes for buffer in workload.buffers_of(workload.batch())),
        },
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="xb-") as name:
        places = Places(Path(name))
        result["transferqueue"] = transferqueue(PEER_PYTHON)
        result |= rates(places, rounds_wanted)
        result["journal"] = journal(places, rounds_wanted)
        result["latency"] = latency.measure(places.address(), places.url("ipc"))
        result["crowd"] = crowd.measure(places.address("tcp"))
        result["idle"] = ours.measure_idle(places.address())
    result["took_s"] = time.perf_counter() - start
    return result


def rounded(value: Any) -> Any:
    """Round every float to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list) else value


def main() -> int:
    """Measure, write, print the bounds."""
    parser = command_line(__doc__, "queue")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of put and get, whose medians are compared")
    options = parser.parse_args()
    result = rounded(measure(options.rounds))
    write_result(options.out, result)
    bounds = queue_bounds(result)
    for bound in bounds:
        print(f"{bound.verdict:5}  {bound.what}: {bound.value_text} ({bound.must_text})")
    print(f"{result['took_s']:.0f} s; TransferQueue: {result['transferqueue'].get('skipped', 'measured')}")
    return 0 if all(bound.holds for bound in bounds) else 1


def measure_disk(directory: Path) -> dict[str, float]:
    """Measure samples and bytes per second of plain sequential writes of the workload."""
    buffers = buffers_of(batch())
    path = directory / "disk"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    stop = threading.Event()

    def flush() -> None:
        while not stop.wait(FSYNC_S):
            os.fdatasync(file)

    flusher = threading.Thread(target=flush)
    flusher.start()
    for _ in range(BATCHES):
        os.writev(file, buffers)
    start = time.perf_counter()
    written = 0
    for _ in range(BATCHES):
        written += os.writev(file, buffers)
    taken = time.perf_counter() - start
    stop.set()
    flusher.join()
    os.close(file)
    path.unlink()
    assert written == BATCHES * sum(buffer.nbytes for buffer in buffers)
    return {"put": BATCHES * BATCH / taken, "bytes_per_s": written / taken}


if __name__ == "__main__":
    raise SystemExit(main())
