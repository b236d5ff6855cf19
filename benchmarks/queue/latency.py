"""One sample at a time: put, claim and ack beside plain round trips, in blocks that alternate in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from benchmarks.harness import in_process
from benchmarks.queue import ours, plain
from benchmarks.queue.workload import FIELDS, batch, buffers_of, quantiles
from xtoken_core.compat.task_client import TaskClient
from xtoken_core.data_plane.address import Address
from xtoken_core.wire import Column
from xtoken_core.wire.columns import offsets_from_lengths

BLOCKS, BLOCK = 20, 100
SMALL_BYTES = 64


def small_sample() -> dict[str, Column]:
    """Return one sample of eight tokens in one column: the cost of a call, not of its bytes."""
    values = memoryview(bytes(SMALL_BYTES))
    return {"input_ids": Column("jagged", "int64", 1, (), values, offsets_from_lengths([SMALL_BYTES // 8]))}


def singles(address: Address, plain_url: str) -> dict[str, Any]:
    """Measure quantiles of calls about one small sample and about one sample of the workload."""
    client, socket = ours.connect(address, "singles"), plain.connect(plain_url)
    numbers = count()
    found: dict[str, Any] = {}
    for size, columns in (("small", small_sample()), ("workload", batch(1))):
        taken: dict[str, list[float]] = {"round_trip": [], "put": [], "claim": [], "ack": []}
        calls = {
            "put": partial(put, client, columns),
            "claim": partial(claim, client, [name for name in FIELDS if name in columns]),
            "ack": partial(ack, client),
        }
        echo = [b"echo", b"0", *buffers_of(columns)]
        for _ in range(BLOCKS):
            taken["round_trip"] += [plain.round_trip(socket, echo) for _ in range(BLOCK)]
            ids = [next(numbers) for _ in range(BLOCK)]
            for call, work in calls.items():
                taken[call] += [timed(work, i) for i in ids]
        found |= {f"{size}_{call}": quantiles(times) for call, times in taken.items()}
    return found


def put(client: TaskClient, columns: dict[str, Column], sample: int) -> None:
    """Put one sample."""
    client.put(ours.PARTITION, [sample], columns)


def claim(client: TaskClient, fields: list[str], _sample: int) -> None:
    """Claim the next sample."""
    client.claim(ours.PARTITION, ours.TASK, count=1, fields=fields)


def ack(client: TaskClient, sample: int) -> None:
    """Acknowledge one sample."""
    client.ack(ours.PARTITION, ours.TASK, [sample])


def timed(call: Callable[[int], None], sample: int) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call(sample)
    return time.perf_counter() - start


def measure(address: Address, plain_url: str) -> dict[str, Any]:
    """Measure both servers, at rest except the one in use."""
    with ours.server(address), plain.server(plain_url):
        found: dict[str, Any] = in_process(singles, address, plain_url)
        return found
