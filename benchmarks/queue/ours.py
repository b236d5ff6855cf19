"""The transfer queue: a real server process, and producers and consumers that use the wire client."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import in_process
from benchmarks.queue.workload import BATCH, BATCHES, FIELDS, PASSES, PATIENCE_S, batch, batch_ids, memory, rate
from xtoken_core.compat.task_client import TaskClient
from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.zmq_transport import ZmqTransport
from xtoken_core.wire import messages as m

ROOT = Path(__file__).parents[2]
PARTITION, TASK = "bench", "read"
MEMORY_LIMIT = 4 << 30
IDLE_S = 10.0
IDLE_WAIT_S = 5.0
SILENCE_S = 600.0


@contextmanager
def server(address: Address, *extra: str) -> Iterator[psutil.Process]:
    """Start a queue in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "xtoken_services.cli",
        "queue",
        "--bind",
        address.url,
        "--memory-limit",
        str(MEMORY_LIMIT),
    ]
    if address.token_file is not None:
        command += ["--token-file", str(address.token_file)]
    process = subprocess.Popen([*command, *extra], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def connect(address: Address, name: str) -> TaskClient:
    """Return a client with a session, and the partition open."""
    deadline = time.monotonic() + PATIENCE_S
    while address.token_file is not None and not address.token_file.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    client = TaskClient(ZmqTransport(address))
    client.hello(name, "bench", incarnation=time.time_ns(), silence_s=SILENCE_S)
    client.open(PARTITION, [m.TaskDef(name=TASK, requires=["input_ids"])])
    return client


def put(address: Address, in_flight: int) -> dict[str, Any]:
    """Measure samples per second put into a queue that was never so full before, and again once that was cleared."""
    client, columns = connect(address, "producer"), batch()

    def send(number: int) -> None:
        client.put(PARTITION, batch_ids(number), columns)

    found = {"put_at_first": rate(send, in_flight)}
    client.clear(PARTITION)
    return found | {"put": rate(send, in_flight)}


def get(address: Address, in_flight: int) -> dict[str, Any]:
    """Measure samples per second read in order, then read shuffled."""
    client, fields = connect(address, "consumer"), list(FIELDS)

    def read_in_order(number: int) -> None:
        client.get(PARTITION, batch_ids(number % BATCHES), fields)

    found = {"get": rate(read_in_order, in_flight, PASSES * BATCHES)}
    ids = list(range(BATCH * BATCHES))
    random.Random(2).shuffle(ids)

    def read(number: int) -> None:
        client.get(PARTITION, ids[number * BATCH : (number + 1) * BATCH], fields)

    return found | {"get_shuffled": rate(read, in_flight)}


def consume(address: Address, in_flight: int) -> dict[str, Any]:
    """Measure samples per second claimed with all their fields and acknowledged."""
    client = connect(address, "consumer")

    def take(_number: int) -> None:
        claimed = client.claim(PARTITION, TASK, count=BATCH, fields=FIELDS)
        assert claimed is not None
        client.ack(PARTITION, TASK, claimed[0].ids)

    return {"claim_ack": rate(take, in_flight)}


def first_put(address: Address) -> None:
    """Connect and put one sample."""
    with connect(address, "first") as client:
        client.put(PARTITION, [1 << 40], batch(1))
        client.clear(PARTITION)


def measure(address: Address, in_flight: int, *extra: str) -> dict[str, float]:
    """Start to first put; put, get and consume in separate phases; what the server's memory does."""
    begin = time.perf_counter()
    with server(address, *extra) as process:
        first_put(address)
        started = time.perf_counter() - begin
        idle = memory(process)
        found = in_process(put, address, in_flight)
        with connect(address, "looks") as client:
            payload = client.stats()["bytes"]
            full = memory(process)
            found |= in_process(get, address, in_flight) | in_process(consume, address, in_flight)
            assert client.stats()["bytes"] == 0
        time.sleep(IDLE_WAIT_S)
        after = memory(process)
    return found | {
        "start_to_first_put_s": started,
        "idle_pss_mib": idle["pss"] / 2**20,
        "memory_over_payload": (full["rss"] - idle["rss"]) / payload,
        "payload_mib": payload / 2**20,
        "rss_start_mib": idle["rss"] / 2**20,
        "rss_after_over_start": after["rss"] / idle["rss"],
    }


def measure_put(address: Address, *extra: str) -> float:
    """Measure samples per second put, and nothing else."""
    with server(address, *extra):
        first_put(address)
        return float(in_process(put, address, 1)["put"])


def measure_idle(address: Address) -> dict[str, float]:
    """Measure an idle queue: proportional memory and fraction of a core, over some seconds."""
    with server(address) as process:
        first_put(address)
        before = process.cpu_times()
        time.sleep(IDLE_S)
        after = process.cpu_times()
        used = after.user + after.system - before.user - before.system
        return {"idle_pss_mib": memory(process)["pss"] / 2**20, "idle_core_share": used / IDLE_S}
