"""Measurements of the queue of one source tree: a process that takes one per input line.

Run by path with a tree as working directory, it measures the queue of that tree by that tree's own benchmark, so that
two commits can be measured in turn (see `benchmarks.queue.compare`). A line names a measurement and its argument, the
answer is one line of JSON:

    rates ipc_1     put and get beside raw pyzmq, by transport and requests in flight
    journal         put without a journal, with one, and the disk's rate
    crowd           1,000 connections
    calls small     a block of single calls to a server at rest beside raw round trips: seconds of each, and
                    microseconds of processor time per call that server and client take, all their threads together
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path.cwd()))
m = importlib.import_module("xtoken_core.wire.messages")
workload = importlib.import_module("benchmarks.queue.workload")
latency = importlib.import_module("benchmarks.queue.latency")
ours = importlib.import_module("benchmarks.queue.ours")
plain = importlib.import_module("benchmarks.queue.plain")
thousand = importlib.import_module("benchmarks.queue.crowd")
whole = importlib.import_module("benchmarks.queue.__main__")

AT_REST = "ipc_1"
"""The one rate at which the wait before memory is measured is kept."""
SIZES = {"small": latency.small_sample, "workload": lambda: workload.batch(1)}


class SingleCalls:
    """A server and a raw one, both at rest but for one client.

    Args:
        addresses: Unused addresses.
        stack: Ends the servers.
    """

    def __init__(self, addresses: Any, stack: ExitStack) -> None:
        address, url = addresses.address(), addresses.url("ipc")
        self._server = stack.enter_context(ours.server(address)).pid
        stack.enter_context(plain.server(url))
        self._client, self._socket = ours.connect(address, "singles"), plain.connect(url)
        self._numbers = count()

    def block(self, size: str) -> dict[str, Any]:
        """Return the seconds of each call and round trip of one block, and the processor time of both processes."""
        columns = SIZES[size]()
        calls: dict[str, Callable[[int], None]] = {
            "put": partial(latency.put, self._client, columns),
            "claim": partial(latency.claim, self._client, [name for name in workload.FIELDS if name in columns]),
            "ack": partial(latency.ack, self._client),
        }
        ids = [next(self._numbers) for _ in range(latency.BLOCK)]
        echo = [b"echo", b"0", *workload.buffers_of(columns)]
        seconds = {"round_trip": [plain.round_trip(self._socket, echo) for _ in ids]}
        used: dict[str, dict[str, float]] = {}
        for name, call in calls.items():
            server, client = processor_ns(self._server), time.process_time_ns()
            seconds[name] = [latency.timed(call, sample) for sample in ids]
            spent = {"client": time.process_time_ns() - client, "server": processor_ns(self._server) - server}
            used[name] = {process: ns / 1e3 / len(ids) for process, ns in spent.items()}
        return {"seconds": seconds, "processor_us": used}


def processor_ns(pid: int) -> int:
    """Return the processor time that the threads of a process have used, in nanoseconds; 0 off Linux."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))


class Measurements:
    """The measurements by name; what they need is started by the first that needs it.

    Args:
        directory: Holds sockets and journals.
        stack: Ends what they have started.
    """

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._addresses, self._stack = whole.Places(directory), stack
        self._calls: SingleCalls | None = None
        self._wait_s = ours.IDLE_WAIT_S

    def rates(self, key: str) -> dict[str, Any]:
        """Measure put and get through raw pyzmq and through the queue."""
        transport, in_flight = key.split("_")
        ours.IDLE_WAIT_S = self._wait_s if key == AT_REST else 0.0
        raw = plain.measure(self._addresses.url(transport), int(in_flight))
        return {"plain": raw, "ours": ours.measure(self._addresses.address(transport), int(in_flight))}

    def journal(self) -> dict[str, Any]:
        """Measure put with a journal and without."""
        found: dict[str, Any] = whole.journal(self._addresses, 1)
        return found

    def crowd(self) -> dict[str, Any]:
        """Measure 1,000 connections."""
        found: dict[str, Any] = thousand.measure(self._addresses.address("tcp"))
        return found

    def calls(self, size: str) -> dict[str, Any]:
        """Measure a block of single calls."""
        if self._calls is None:
            self._calls = SingleCalls(self._addresses, self._stack)
        return self._calls.block(size)


def main() -> None:
    """Answer each line of standard input."""
    assert str(m.__file__).startswith(str(Path.cwd()))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # servers inherit standard output
    with tempfile.TemporaryDirectory(prefix="xs-") as name, ExitStack() as stack:
        measurements = Measurements(Path(name), stack)
        for line in sys.stdin:
            what, *arguments = line.split()
            print(json.dumps(getattr(measurements, what)(*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
