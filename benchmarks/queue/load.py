"""Traffic of whole runs on one queue: `python -m benchmarks.queue.load --runs 100 --steps 200 --out RESULT.json`.

Every run has ten connections: eight collators, a teacher and a trainer, which send what real workers send, with columns
of a few bytes. 100 runs are 1,000 connections; `--runs 1 --steps 86400` is a day at one step a second. Each trainer
checks the ids of every step. The queue's memory is sampled by the steps done; the exit status is 1 if an id was wrong,
or the memory of a single run's queue grew by more than 5% after the first tenth.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import zmq

from benchmarks.harness import command_line, write_result
from benchmarks.queue import ours
from benchmarks.queue.__main__ import machine, rounded
from benchmarks.queue.crowd import Connection
from benchmarks.queue.latency import small_sample
from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.frames import receive_frames, send_frames
from xtoken_core.wire import messages as m
from xtoken_core.wire import pack_columns
from xtoken_core.wire.columns import Column, offsets_from_lengths
from xtoken_services.supervisor.launchers.local import LOOPBACK, free_port

SAMPLES, BLOCK, AHEAD = 8, 4, 4
"""Samples of a step, positions of a block, steps that collators may be ahead."""
COLLATORS = 8
WAIT_S = 5.0
SAMPLE_S = 0.5
GROWTH = 1.05
FIELDS = list(small_sample())
EXPECTED = ("exhausted", "lease_revoked")
"""Errors of a healthy run: at its end, and for blocks that were leased before the trainer's rewind."""

Talk = Generator[tuple[m.Request, list[memoryview]], Any, None]
"""A worker: yields requests, is sent replies."""


def rows(count: int) -> dict[str, Column]:
    """Return the columns of so many rows of eight tokens."""
    values = memoryview(bytes(64 * count))
    return {"input_ids": Column("jagged", "int64", count, (), values, offsets_from_lengths([8] * count))}


class Worker(Connection):
    """One connection that plays one worker of a run.

    A queue has one set of trainers, distinguished by rank and replaced together by a newer incarnation, so the trainers
    of all runs have one incarnation, and each a rank of its own.

    Args:
        context: Context of its process.
        address: Address of the queue.
        run: Number of the run.
        role: `collator`, `teacher` or `trainer`.
        number: Number among the workers of its role.
        steps: Steps of the run.
        counts: Steps done, by run, which trainers write.

    Attributes:
        waits: Seconds that each request took that may not wait.
        done: Its work has ended.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: Address, run: int, role: str, number: int, steps: int,
        counts: Any,
    ) -> None:  # fmt: skip
        super().__init__(context, address)
        self.role, self.name, self.run = role, f"{role} {number} of {run}", run
        self.partition, self.steps, self.counts = f"run {run}", steps, counts
        self.done = False
        self._number = 0
        self._may_wait = False
        self._talk = self._work()
        self._send(next(self._talk))

    def receive(self) -> None:
        """Take a reply and send the next request."""
        frames = receive_frames(self.socket)
        reply = m.decode_reply(frames[0].buffer)
        if not self._may_wait:
            self.waits.append(time.perf_counter() - self._sent)
        if isinstance(reply, m.Failure) and reply.code not in EXPECTED:
            raise RuntimeError(f"{self.name}: {reply.code}: {reply.message}")
        try:
            self._send(self._talk.send(reply))
        except StopIteration:
            self.done = True

    def _send(self, message: tuple[m.Request, list[memoryview]]) -> None:
        request, buffers = message
        self._number += 1
        request.id = f"c.{self._number}"
        if isinstance(request, m.SessionRequest):
            request.session = self.session
        self._may_wait = bool(getattr(request, "wait_s", 0.0))
        self._sent = time.perf_counter()
        send_frames(self.socket, m.encode(request), buffers)

    def _at(self, kind: type[m.PartitionRequest], **fields: Any) -> m.Request:
        return kind(id="", session="", partition=self.partition, **fields)

    def _ask(self, request: m.Request) -> Generator[tuple[m.Request, list[memoryview]], Any, Any]:
        """Repeat a request that may wait until it is answered."""
        while True:
            reply = yield request, []
            if not isinstance(reply, m.Empty):
                return reply

    def _work(self) -> Talk:
        hello = m.Hello(
            id="", versions=[m.VERSION], name=self.name, role=self.role, rank=self.run, incarnation=1, silence_s=600
        )
        welcome = yield hello, []
        self.session = welcome.session
        definition = m.RunDef(
            positions=self.steps * SAMPLES, samples_per_step=SAMPLES, block_size=BLOCK, span=AHEAD * SAMPLES,
            teachers=1, ranks=len(self.counts), slots=2, document=b"{}",
        )  # fmt: skip
        yield self._at(m.OpenPartition, tasks=[], run=definition), []
        yield from getattr(self, f"_{self.role}")()
        yield m.Bye(id="", session=""), []

    def _collator(self) -> Talk:
        heads, buffers = pack_columns(rows(BLOCK))
        while True:
            block = yield from self._ask(self._at(m.LeaseBlock, wait_s=WAIT_S))
            if isinstance(block, m.Failure):
                return
            ids = list(range(block.first, block.first + block.count))
            yield self._at(m.Put, ids=ids, columns=heads, lease=block.lease), buffers

    def _teacher(self) -> Talk:
        trainer = yield from self._ask(self._at(m.AwaitTrainer, rank=self.run, wait_s=WAIT_S))
        ring = yield self._at(m.AnnounceRing, teacher=0, rank=self.run, trainer=trainer.trainer, handle=b"ring"), []
        yield from self._ask(self._at(m.AwaitOpened, ring=ring.ring, wait_s=WAIT_S))
        for step in range(self.steps):
            at = {"rewinds": trainer.rewinds, "wait_s": WAIT_S}
            window = yield from self._ask(self._at(m.Window, step=step, fields=FIELDS, **at))
            claimed = yield from self._ask(self._at(m.ClaimSlot, ring=ring.ring, ids=window.ids, fields=FIELDS, **at))
            yield self._at(m.Complete, lease=claimed.lease), []
        # A teacher that leaves takes its unread slots along, so it stays until the run has ended.
        yield from self._ask(self._at(m.Window, step=self.steps, fields=FIELDS, **at))

    def _trainer(self) -> Talk:
        rewinds = (yield self._at(m.Rewind, step=0), []).rewinds
        ring = yield from self._ask(self._at(m.AwaitRing, teacher=0, wait_s=WAIT_S))
        yield self._at(m.OpenedRing, teacher=0, ring=ring.ring), []
        for step in range(self.steps):
            at = {"rewinds": rewinds, "wait_s": WAIT_S}
            window = yield from self._ask(self._at(m.Window, step=step, fields=FIELDS, **at))
            if window.ids != list(range(step * SAMPLES, (step + 1) * SAMPLES)) or window.skipped or window.dead:
                raise RuntimeError(f"{self.name}: step {step} has ids {window.ids}")
            batch = yield from self._ask(self._at(m.ClaimBatch, ids=window.ids, fields=FIELDS, **at))
            for slot in batch.slots:
                yield self._at(m.Release, ring=slot.ring, slot=slot.slot, generation=slot.generation), []
            verdict = yield self._at(m.CheckStep, step=step, rewinds=rewinds), []
            if verdict.redo:
                raise RuntimeError(f"{self.name}: step {step} is to be repeated")
            yield self._at(m.AckWindow, step=step, rewinds=rewinds), []
            self.counts[self.run] = step + 1


_shared: list[Any] = []
"""In a process that plays workers: the steps done, by run."""


def share(counts: Any) -> None:
    """Keep the counts of steps, which a process can only inherit."""
    _shared.append(counts)


def work(address: Address, runs: range, steps: int) -> list[list[float]]:
    """Play all workers of some runs in one process; return their waits."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.max_sockets = 65_535
    try:
        roles = [("trainer", 0), ("teacher", 0), *(("collator", number) for number in range(COLLATORS))]
        workers = [Worker(context, address, run, *role, steps, _shared[0]) for run in runs for role in roles]
        poller, by_socket = zmq.Poller(), {worker.socket: worker for worker in workers}
        for socket in by_socket:
            poller.register(socket, zmq.POLLIN)
        left = len(workers)
        while left:
            for socket, _ in poller.poll():
                by_socket[socket].receive()
                if by_socket[socket].done:
                    poller.unregister(socket)
                    left -= 1
        return [worker.waits for worker in workers]
    finally:
        context.destroy(linger=0)


def measure(address: Address, runs: int, steps: int, processes: int) -> dict[str, Any]:
    """Let the runs train to their end, and return waits, rates and the queue's memory over the steps."""
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", runs, lock=False)
    pool = ProcessPoolExecutor(processes, context, share, (counts,))
    with ours.server(address) as process, pool:
        ours.first_put(address)
        memory = [(0, process.memory_info().rss)]
        start, used = time.perf_counter(), process.cpu_times()
        parts = [pool.submit(work, address, range(number, runs, processes), steps) for number in range(processes)]
        connections = 0
        while not all(part.done() for part in parts):
            memory.append((sum(counts), process.memory_info().rss))
            connections = max(connections, len(process.net_connections("all")) - 1)
            time.sleep(SAMPLE_S)
        memory.append((sum(counts), process.memory_info().rss))
        seconds, after = time.perf_counter() - start, process.cpu_times()
    errors = [repr(error) for part in parts if (error := part.exception())]
    waits = [wait for part in parts if not part.exception() for wait in part.result()]
    return {
        "connections": connections, "steps_done": sum(counts), "seconds": seconds, "errors": errors,
        "steps_per_s": sum(counts) / seconds, **_waits(waits), **_memory(memory),
        "server_cpu_s": after.user + after.system - used.user - used.system,
    }  # fmt: skip


def _waits(waits: list[list[float]]) -> dict[str, float]:
    """Summarise the seconds that requests took which may not wait."""
    every = sorted(wait for worker in waits for wait in worker)
    if not every:
        return {"answers": 0}
    return {
        "answers": len(every),
        "median_wait_ms": 1000 * statistics.median(every),
        "p99_wait_ms": 1000 * every[int(0.99 * len(every))],
        "longest_wait_ms": 1000 * every[-1],
        "worst_client_mean_wait_ms": 1000 * max(statistics.mean(worker) for worker in waits if worker),
    }


def _memory(memory: list[tuple[int, int]]) -> dict[str, Any]:
    """Compare the queue's memory after the first tenth of the steps with its largest after that."""
    total = memory[-1][0]
    first = next((rss for steps, rss in memory if steps >= total / 10), memory[-1][1])
    later = [rss for steps, rss in memory if steps >= total / 10]
    kept = memory[:: max(len(memory) // 20, 1)]
    return {
        "rss_mib_after_a_tenth": first / 2**20, "rss_mib_at_the_end": memory[-1][1] / 2**20,
        "rss_most_over_a_tenth": max(later, default=first) / first,
        "rss_end_over_a_tenth": memory[-1][1] / first,
        "rss_mib_by_steps": [[steps, round(rss / 2**20, 2)] for steps, rss in kept],
    }  # fmt: skip


def main() -> int:
    """Measure, write the result; 1 if an id was wrong or memory grew."""
    parser = command_line(__doc__, "queue_runs")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=200, help="of each run")
    parser.add_argument("--processes", type=int, default=4, help="that play the workers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xb-") as name:
        address = Address.parse(f"tcp://{LOOPBACK}:{free_port(LOOPBACK)}", Path(name) / "token")
        found = measure(address, options.runs, options.steps, min(options.processes, options.runs))
    grown = options.runs == 1 and found["rss_end_over_a_tenth"] > GROWTH
    complete = found["steps_done"] == options.runs * options.steps
    result = {
        "taken_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "machine": machine(),
        "settings": {
            "runs": options.runs, "steps": options.steps, "processes": options.processes, "samples_per_step": SAMPLES,
            "transport": "tcp", "python": sys.version.split()[0], "pyzmq": zmq.__version__,
        },
        "passed": complete and not found["errors"] and not grown, **rounded(found),
    }  # fmt: skip
    write_result(options.out, result)
    print(json.dumps({key: value for key, value in result.items() if key != "rss_mib_by_steps"}, indent=1))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
