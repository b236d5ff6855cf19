"""One process of load for `tests.contract.killing`: works until its input ends, and writes down what it saw."""

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.contract.peers import column_from, ints
from xtoken_core.compat.task_client import TaskClient
from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.queue_client import AlreadyDone
from xtoken_core.data_plane.run_client import RunClient
from xtoken_core.data_plane.zmq_transport import ZmqTransport
from xtoken_core.errors import StaleSessionError
from xtoken_core.wire import QueueError
from xtoken_core.wire import messages as m

TASKS = [m.TaskDef(name="a", requires=["x"])]
RUN = m.RunDef(
    positions=1 << 40, samples_per_step=8, block_size=4, span=32, teachers=1, ranks=1, slots=2, document=b"{}"
)
STEP, BLOCK = RUN.samples_per_step, RUN.block_size
TRANSIENT = {"lease_revoked", "rewound", "ring_closed", "no_room", "unknown_sample", "conflict"}
LARGE = 2 << 20
BACKLOG = 400


class Log:
    """Events with the monotonic clock of the machine, one JSON list a line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._lock = threading.Lock()
        self.stop = threading.Event()

    def note(self, kind: str, *what: int | str, at: int = 0) -> None:
        """Write one event for each of `what`."""
        with self._lock:
            self._file.writelines(json.dumps([kind, at or time.monotonic_ns(), one]) + "\n" for one in what)
            self._file.flush()

    def go_on(self, name: str, role: str, address: Address, work: Callable[[TaskClient], None]) -> None:
        """Work in one session after the other until stopped; whatever a restart explains is no error."""
        client = TaskClient(ZmqTransport(address))
        try:
            while not self.stop.is_set():
                client.hello(name, role, incarnation=time.time_ns(), silence_s=600.0)
                try:
                    work(client)
                except (StaleSessionError, AlreadyDone):
                    continue
                except QueueError as error:
                    if error.code not in TRANSIENT:
                        raise
        except BaseException as error:
            self.note("error", f"{name}: {error!r}")
            self.stop.set()
        finally:
            client.close()


def row(sample: int, large: bool) -> tuple[Any, ...]:
    """What a sample's row must be."""
    return ("jagged", "uint8", (), [sample.to_bytes(8, "little") * (LARGE // 8 if large else 64)])


def producer(log: Log, client: TaskClient, number: int, puts: list[int]) -> None:
    """Put samples of its own, some of them large, so that a kill may come in the middle of a record."""
    client.open("p", TASKS)
    while not log.stop.is_set():
        sample = 2 * len(puts) + number
        large = sample % 40 < 2
        client.put("p", [sample], {"x": column_from(row(sample, large))}, wait_s=5.0)
        puts.append(sample)
        log.note("put", sample)
        if len(client.list_samples("p", "ready", task="a", limit=BACKLOG).ids) >= BACKLOG:
            log.stop.wait(0.05)


def consumer(log: Log, client: TaskClient, rng: random.Random) -> None:
    """Claim, look at the rows, ack; sometimes only a part, or give all back."""
    client.open("p", TASKS)
    while not log.stop.is_set():
        asked = time.monotonic_ns()
        found = client.claim("p", "a", count=rng.randint(1, 6), fields=["x"])
        if found is None:
            log.stop.wait(0.01)
            continue
        claim, columns = found
        log.note("got", *claim.ids, at=asked)
        for at, sample in enumerate(claim.ids):
            start, stop = columns["x"].row_bounds(at)
            if bytes(columns["x"].values[start:stop]) != row(sample, sample % 40 < 2)[3][0]:
                log.note("error", f"sample {sample} came back changed")
        if rng.random() < 0.1:
            client.nack("p", claim.lease, [], "not now")
            continue
        client.ack("p", "a", claim.ids)
        log.note("acked", *claim.ids)


class Run:
    """A run's three workers, and what the trainer's checkpoint would say.

    Attributes:
        step: The step to go on at: everything below is acked, and may not come again until it is lowered.
        rewound: Grows when the trainer begins to rewind, and when it has; what was seen across that, or while it is
            odd, proves nothing.
        blocks: Blocks whose put was answered, and that no rewind has opened again.
    """

    def __init__(self, log: Log, address: Address, seed: int) -> None:
        self.log, self.address, self.rng = log, address, random.Random(seed)
        self.step, self.rewound = 0, 0
        self.blocks: set[int] = set()
        self.skipped: dict[int, str] = {}
        self._lock = threading.Lock()

    def settled(self, rewound: int) -> bool:
        """Whether no rewind has begun since, or was under way."""
        return rewound == self.rewound and rewound % 2 == 0

    def threads(self) -> list[threading.Thread]:
        """One a worker."""
        works = (("collator", self.collate), ("teacher", self.teach), ("trainer", self.train))
        return [threading.Thread(target=self.log.go_on, args=(n, n, self.address, w)) for n, w in works]

    def collate(self, client: TaskClient) -> None:
        """Every seventh position is a tombstone."""
        client.open("r", run=RUN)
        run = RunClient(client, "r")
        while not self.log.stop.is_set():
            step, rewound = self.step, self.rewound
            block = run.lease_block(wait_s=0.2)
            if block is None:
                continue
            with self._lock:
                if self.settled(rewound) and block.first < step * STEP:
                    self.log.note("after_ack", block.first)
                if self.settled(rewound) and block.first in self.blocks:
                    self.log.note("lost", block.first)
            ids = [p for p in range(block.first, block.first + block.count) if p % 7]
            gone = {p: "no text" for p in range(block.first, block.first + block.count) if p % 7 == 0}
            run.put_block(block.lease, ids, {"input_ids": column_from(ints(*([p, p] for p in ids)))}, gone)
            with self._lock:
                if self.settled(rewound):
                    self.blocks.add(block.first)

    def teach(self, client: TaskClient) -> None:
        """Fill slots in order."""
        client.open("r", run=RUN)
        run = RunClient(client, "r")
        trainer = run.await_trainer(0, wait_s=0.5)
        if trainer is None:
            return
        ring = run.announce_ring(0, 0, trainer.trainer, b"handle")
        while not run.await_opened(ring, wait_s=0.5):
            if self.log.stop.is_set():
                return
        step = trainer.step
        while not self.log.stop.is_set():
            asked, rewound = self.step, self.rewound
            rows = run.window(step, ["input_ids"], rewinds=trainer.rewinds, wait_s=0.2)
            if rows is None:
                continue
            found = run.claim_slot(ring, rows.ids, ["input_ids"], rewinds=trainer.rewinds, wait_s=0.5)
            if found is None:
                continue
            if self.settled(rewound) and step < asked:
                self.log.note("after_ack", *rows.ids)
            run.complete(found[0].lease)
            step += 1

    def train(self, client: TaskClient) -> None:
        """Take steps; now and then go back by one or two."""
        client.open("r", run=RUN)
        run = RunClient(client, "r")
        with self._lock:
            self.rewound += 1 - self.rewound % 2
            if self.step > 2 and self.rng.random() < 0.3:
                self.blocks.clear()
                self.step -= self.rng.randint(1, 2)
                self.log.note("rewind", self.step)
        below = {p: why for p, why in self.skipped.items() if p < self.step * STEP}
        rewinds = run.rewind(self.step, below, {})
        with self._lock:
            # the step's ack may have been taken and its answer lost: its blocks, and those that came within reach by
            # it, were opened again
            kept = range((self.step + 1) * STEP, self.step * STEP + RUN.span)
            self.blocks.intersection_update(kept)
            self.rewound += 1
        while (ring := run.await_ring(0, wait_s=0.5)) is None:
            if self.log.stop.is_set():
                return
        run.confirm_ring(0, ring.ring)
        while not self.log.stop.is_set():
            rows = run.window(self.step, ["input_ids"], rewinds=rewinds, wait_s=0.2)
            if rows is None:
                continue
            self._look(rows.ids, rows.skipped)
            found = run.claim_batch(rows.ids, [], rewinds=rewinds, wait_s=0.5)
            if found is None:
                continue
            for ref in found[0].slots:
                run.release(ref.ring, ref.slot, ref.generation)
            if run.check_step(self.step, [], rewinds=rewinds):
                return
            run.ack_window(self.step, rewinds=rewinds)
            self.log.note("step", self.step)
            self.step += 1

    def _look(self, ids: list[int], skipped: list[int]) -> None:
        window = range(self.step * STEP, (self.step + 1) * STEP)
        if ids != [p for p in window if p % 7] or skipped != [p for p in window if p % 7 == 0]:
            self.log.note("error", f"step {self.step} has rows {ids} and tombstones {skipped}")
        self.skipped.update(dict.fromkeys(skipped, "no text"))


def main(role: str, url: str, path: Path, seed: int) -> None:
    """Work as `role` until standard input ends."""
    log, address = Log(path), Address.parse(url)
    kind, _, number = role.partition("-")
    if kind == "run":
        threads = Run(log, address, seed).threads()
    elif kind == "producer":
        puts: list[int] = []
        threads = [_thread(log, role, address, lambda client: producer(log, client, int(number), puts))]
    else:
        rng = random.Random(f"{seed} {number}")
        threads = [_thread(log, role, address, lambda client: consumer(log, client, rng))]
    for thread in threads:
        thread.start()
    while os.read(0, 1):
        pass
    log.stop.set()
    for thread in threads:
        thread.join()


def _thread(log: Log, role: str, address: Address, work: Callable[[TaskClient], None]) -> threading.Thread:
    return threading.Thread(target=log.go_on, args=(role, "worker", address, work))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
