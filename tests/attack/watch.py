"""Honest clients of the queue and the control plane, and the memory and life of their processes."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from tests.attack.stage import QUEUE_MEMORY, Stage
from tests.attack.target import connect
from tests.contract.reference_client import Client, RefusedError
from xtoken_core.data_plane.address import Address

LONGEST_WAIT_S = 1.0
MARGIN = 1.25
BUDGET = (64 << 20) + QUEUE_MEMORY // 4
QUEUE_BOUND = int(1.25 * (QUEUE_MEMORY + BUDGET)) + QUEUE_MEMORY + (64 << 20)
"""Bytes above its beginning that proto/README.md (sections 1 and 6) allows a queue with the limit `QUEUE_MEMORY`."""
CONTROL_BOUND = 256 << 20
"""Bytes above its beginning for a control plane that shows two runs and validates a few."""
EVERY_S = 0.1
TASKS = [{"name": "a", "requires": ["x"]}]


@dataclass
class Watched:
    """What was seen since the last `take`.

    Attributes:
        faults: One text for each, without repetition.
        requests: Honest requests that were answered.
        longest_s: Longest wait of an honest request by the clock of `tests.attack.free_time`, by what was asked.
        longest_wall_s: The same by the wall clock.
        foreign_load: Fractions of the machine that other processes took, one per sample.
        most_bytes: Greatest memory above the beginning, by process.
        longest_pause_s: Longest delay of a thread that sleeps: how long this machine gave no time to anything.
    """

    faults: list[str] = field(default_factory=list)
    requests: int = 0
    longest_s: dict[str, float] = field(default_factory=dict)
    longest_wall_s: dict[str, float] = field(default_factory=dict)
    foreign_load: list[float] = field(default_factory=list)
    most_bytes: dict[str, int] = field(default_factory=dict)
    longest_pause_s: float = 0.0


class Watch:
    """Threads that use the stage as honest clients do, until `close`."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._seen, self._lock, self._over = Watched(), threading.Lock(), threading.Event()
        self._processes = {name: psutil.Process(pid) for name, pid in stage.pids.items() if pid}
        self._first = {name: self._processes[name].memory_info().rss for name in self._watched()}
        self._threads = [
            threading.Thread(target=work, daemon=True)
            for work in (
                lambda: self._use_queue("queue", stage.target.queues[0]),
                lambda: self._use_queue("tcp queue", stage.target.queues[1]),
                self._use_control,
                self._watch_processes,
                self._watch_pauses,
                lambda: stage.target.clock.follow(self._over),
            )
        ]
        for thread in self._threads:
            thread.start()

    def take(self) -> Watched:
        """Return what was seen, and begin anew."""
        with self._lock:
            seen, self._seen = self._seen, Watched()
        return seen

    def close(self) -> None:
        """End the threads."""
        self._over.set()
        for thread in self._threads:
            thread.join(30)

    def _watched(self) -> list[str]:
        return [name for name in self._processes if name == "control" or "queue" in name]

    def _fault(self, text: str) -> None:
        with self._lock:
            if text not in self._seen.faults:
                self._seen.faults.append(text)

    def _timed(self, what: str, request: Callable[[], object]) -> None:
        """Send a request; a fault if it fails or waits too long."""
        clock = self.stage.target.clock
        began = clock.now()
        try:
            request()
        except Exception as error:
            self._fault(f"{what} failed: {type(error).__name__}: {str(error)[:200]}")
        seconds, wall = clock.since(began), time.monotonic() - began[1]
        with self._lock:
            self._seen.requests += 1
            for longest, waited in ((self._seen.longest_s, seconds), (self._seen.longest_wall_s, wall)):
                longest[what] = max(longest.get(what, 0.0), round(waited, 3))
        if seconds > LONGEST_WAIT_S:
            self._fault(f"{what} waited over {LONGEST_WAIT_S:g} s")

    def _use_queue(self, name: str, queue: Address) -> None:
        """Put, claim and acknowledge samples; a session that was ended is a fault and is opened again."""
        number = 0
        while not self._over.is_set():
            client = connect(queue, patience_s=30.0)
            try:
                self._timed(f"{name}: hello", lambda client=client: client.hello("honest", "library", time.time_ns()))
                self._timed(f"{name}: open", lambda client=client: client.call("open", partition="honest", tasks=TASKS))
                while not self._over.is_set() and client.session is not None:
                    number += 1
                    self._timed(
                        f"{name}: put, claim, ack", lambda client=client, number=number: one_sample(client, number)
                    )
                    time.sleep(EVERY_S)
            except (RefusedError, OSError) as error:
                self._fault(f"{name}: the honest session ended: {error}")
            finally:
                client.close()

    def _use_control(self) -> None:
        with self.stage.target.http(timeout=30) as http:
            while not self._over.is_set():
                for path in ("/v1/runs", f"/v1/runs/{self.stage.run_id}", "/readyz"):
                    self._timed(f"GET {path}", lambda path=path: http.get(path).raise_for_status())
                time.sleep(EVERY_S)

    def _watch_processes(self) -> None:
        bounds = {name: bound_of(name) for name in self._watched()}
        while not self._over.is_set():
            for name, process in self._processes.items():
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                    self._fault(f"{name} has ended{self.stage.end_of_log(name)}")
                    continue
                if name not in bounds:
                    continue
                with suppress(psutil.NoSuchProcess):
                    above = process.memory_info().rss - self._first[name]
                    with self._lock:
                        self._seen.most_bytes[name] = max(self._seen.most_bytes.get(name, 0), above)
                    if above > MARGIN * bounds[name]:
                        self._fault(f"{name} took {MARGIN:g} times its bound of {bounds[name] >> 20} MiB")
            time.sleep(0.05)

    def _watch_pauses(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            time.sleep(0.01)
            with self._lock:
                self._seen.longest_pause_s = max(self._seen.longest_pause_s, round(time.monotonic() - began - 0.01, 3))
                self._seen.foreign_load.append(self.stage.target.clock.foreign_load())


def bound_of(name: str) -> int:
    """Return the bytes above its beginning that a process may take, without the margin."""
    return CONTROL_BOUND if name == "control" else QUEUE_BOUND


def one_sample(client: Client, number: int) -> None:
    """Put a sample, claim it, compare it and acknowledge it.

    Raises:
        ValueError: It came back otherwise.
    """
    column = {"x": ("dense", "int64", (), [number.to_bytes(8, "little")])}
    client.call("put", partition="honest", ids=[number], columns=column)
    reply = client.call("claim", partition="honest", task="a", count=1, fields=["x"])
    if reply is None or reply["ids"] != [number] or reply["columns"]["x"] != column["x"]:
        raise ValueError(f"sample {number} came back as {reply}")
    client.call("ack", partition="honest", task="a", ids=[number])
